"""Packed streams: shared prompts and padding change the cost, never the values or the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.data.prefix_tree import LEAST_SHARED
from megarl.data.stream import Response, ScorePosition, Unit, context_parallel_shard, pack, split_shared_prompts
from megarl.megatron.attention import ReferenceAttention, stream_attention
from megarl.option_list import parts

HEADS, KV_HEADS, DIM = 4, 2, 8
BROUGHT = {module.NAME: module for module in parts("core_attention")}
"""By name the attention that options bring, beside the core's own."""


def _units(generator: torch.Generator) -> list[Unit]:
    def ids(length: int) -> torch.Tensor:
        return torch.randint(0, 100, (length,), generator=generator)

    def response(index: int, length: int, *begun: torch.Tensor) -> Response:
        tokens = torch.cat([*begun, ids(length)])
        mask = torch.rand(len(tokens), generator=generator) < 0.7
        return Response(index, tokens, mask, {"advantages": torch.randn(len(tokens), generator=generator)})

    first, second, both = ids(LEAST_SHARED), ids(3), ids(LEAST_SHARED)
    return [
        Unit(ids(5), [response(0, 3), response(1, 7), response(2, 1)]),
        Unit(ids(2), [response(3, 4)]),
        Unit(ids(9), [response(4, 1), response(5, 2)]),
        # Three levels; one response ends where the others go on, and one has its prompt alone with them.
        Unit(ids(6), [response(6, 4, first), response(7, 2), response(8, 5, first, second), response(9, 1, first, second)]),
        Unit(ids(3), [response(10, 7, both), response(11, 2, both)]),
    ]


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of one sequence by the textbook formula in float64; `[L, heads, d]` each, a sink for each head."""
    repeat = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        q, k, v = query[:, head].double(), key[:, head // repeat].double(), value[:, head // repeat].double()
        scores = (q @ k.T) / DIM**0.5
        ahead = torch.arange(len(q))[None] - torch.arange(len(q))[:, None]
        scores = scores.masked_fill(ahead > 0, -torch.inf)
        if window is not None:
            scores = scores.masked_fill(ahead <= -window, -torch.inf)
        exponentials = scores.exp()
        beside = 0.0 if sinks is None else sinks[head].exp()
        outputs.append(exponentials / (exponentials.sum(-1, keepdim=True) + beside) @ v)
    return torch.stack(outputs, dim=1)


def _config(window: int | None, **more: Any) -> Any:
    """Of a model with one layer."""
    sizes = {"num_layers": 1, "hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_query_groups": KV_HEADS}
    return TransformerConfig(**sizes, window_size=None if window is None else (window - 1, 0), **more)


@pytest.mark.parametrize("name", ["reference", *BROUGHT])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (1, False), (3, False), (6, True), (12, False), (None, True)])
def test_packed_attention_equals_dense_attention_of_each_sequence_alone(
    name: str, share: bool, window: int | None, has_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    units = _units(generator)
    stream = pack(units if share else split_shared_prompts(units), pad_to_multiple=8)
    assert len(stream.token_ids) % 8 == 0
    # Token-dependent features, so that the same token at the same position has the same query wherever it is laid.
    table = torch.randn(100, 48, HEADS + 2 * KV_HEADS, DIM, generator=generator, dtype=torch.float64)
    features = table[stream.token_ids, stream.position_ids].requires_grad_()
    query, key, value = features.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    kind = BROUGHT[name].MODULE if name in BROUGHT else ReferenceAttention
    attention = kind(_config(window, softmax_type="learnable" if has_sinks else "vanilla"), 1, None, "self")
    sinks = None
    if has_sinks:
        assert attention.softmax_offset is not None
        attention.softmax_offset.data = torch.randn(HEADS, generator=generator, dtype=torch.float64)
        sinks = attention.softmax_offset.detach().double().requires_grad_()
    whole, windows = context_parallel_shard(stream, 1, 0), [None, window]
    packed = BROUGHT[name].attention_of(stream, whole, windows=windows) if name in BROUGHT else stream_attention(
        stream, whole, torch.float64, windows=windows
    )  # fmt: skip
    assert not share or max(len(segment.path) for segment in stream.segments) == 3
    out = attention(query[:, None], key[:, None], value[:, None], None, packed_seq_params=packed)
    scored = out[stream.rows, 0].view(-1, HEADS, DIM)
    weights = torch.randn(scored.shape, generator=torch.Generator().manual_seed(1))
    (scored * weights).sum().backward()

    expected, table_gradient = [], torch.zeros_like(table, dtype=torch.float64)
    at = 0
    for unit in units:
        for response in unit.responses:
            tokens = torch.cat([unit.prompt_ids, response.token_ids])[:-1]
            positions = torch.arange(len(tokens))
            alone = table[tokens, positions].double().requires_grad_()
            dense = _dense(*alone.split([HEADS, KV_HEADS, KV_HEADS], dim=1), window, sinks)
            rows = len(unit.prompt_ids) - 1 + response.mask.nonzero().flatten()
            expected.append(dense[rows].detach())
            (dense[rows] * weights[at : at + len(rows)].double()).sum().backward()
            table_gradient.index_put_((tokens, positions), alone.grad, accumulate=True)
            at += len(rows)
    torch.testing.assert_close(scored.double(), torch.cat(expected), rtol=1e-5, atol=1e-6)
    if sinks is not None:
        assert attention.softmax_offset is not None
        torch.testing.assert_close(attention.softmax_offset.grad.double(), sinks.grad, rtol=1e-5, atol=1e-6)
    packed_gradient = torch.zeros_like(table_gradient)
    assert features.grad is not None
    packed_gradient.index_put_((stream.token_ids, stream.position_ids), features.grad.double(), accumulate=True)
    torch.testing.assert_close(packed_gradient, table_gradient, rtol=1e-5, atol=1e-6)


def test_scored_rows_predict_the_masked_tokens_and_results_return_to_their_places() -> None:
    units = _units(torch.Generator().manual_seed(2))
    stream = pack(units)
    responses = {r.index: (u, r) for u in units for r in u.responses}
    own = [stream.targets, stream.columns["advantages"], stream.position_ids[stream.rows], stream.token_ids[stream.rows]]
    answers = stream.answers(torch.stack([values.double() for values in own], dim=1))
    assert answers.keys() == responses.keys()
    for index, (unit, response) in responses.items():
        targets, advantages, positions, tokens = answers[index].T
        assert torch.equal(targets, response.token_ids * response.mask)
        assert torch.equal(advantages, response.columns["advantages"] * response.mask)
        whole = torch.cat([unit.prompt_ids, response.token_ids])
        for place in response.mask.nonzero().flatten().tolist():
            position = len(unit.prompt_ids) + place - 1
            assert positions[place] == position
            assert tokens[place] == whole[position]


def test_a_reward_model_scores_the_last_token_of_each_response() -> None:
    units = _units(torch.Generator().manual_seed(3))
    for unit in units:
        for response in unit.responses:
            response.mask = torch.arange(len(response.token_ids)) == len(response.token_ids) - 1
    stream = pack(units, position=ScorePosition.AT)
    lasts = [r.token_ids[-1] for u in units for r in u.responses]
    assert torch.equal(stream.token_ids[stream.rows], torch.stack(lasts))
