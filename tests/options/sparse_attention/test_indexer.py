"""What an indexer chooses, attention to that, and the indexer's loss, against formulas written out in float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.data.stream import Response, StreamShard, Unit, context_parallel_shard, pack
from megarl.megatron.latent_attention import Rotation
from megarl.options.sparse_attention import calls
from megarl.options.sparse_attention.attention import _ToChosenKeys
from megarl.options.sparse_attention.calls import IndexedOrder, indexed_order
from megarl.options.sparse_attention.indexer import Indexer, Scored, best, choose, columns_of
from megarl.options.sparse_attention.indexer_loss import Attended, indexer_loss
from tests.families import hugging_face

HEADS, INDEX_HEADS, DIM, VALUE, TOP_K = 3, 4, 5, 6, 4
SCALE = 0.6


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def units() -> list[Unit]:
    """Prompts that responses share, in which there are fewer keys than are chosen, and more."""
    generator = torch.Generator().manual_seed(2)

    def ids(length: int) -> Tensor:
        return torch.randint(0, 50, (length,), generator=generator)

    lengths = {3: (2, 9), 11: (1, 7, 20), 2: (5,)}
    indices = iter(range(9))
    found = []
    for prompt, responses in lengths.items():
        made = [Response(next(indices), ids(n), torch.ones(n, dtype=torch.bool)) for n in responses]
        found.append(Unit(ids(prompt), made))
    return found


def laid(cp: int = 1, rank: int = 0) -> tuple[Any, StreamShard, IndexedOrder]:
    """The stream of `units`, the share of a rank, and its order."""
    stream = pack(units(), segment_multiple=1 if cp == 1 else 2 * cp, pad_to_multiple=2 * cp)
    share = context_parallel_shard(stream, cp, rank)
    return stream, share, indexed_order(stream, share, weighted=True)


def inputs(tokens: int) -> dict[str, Tensor]:
    """Of all tokens of a stream, in float64, with gradients."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "query": (HEADS, DIM),
        "key": (HEADS, DIM),
        "value": (HEADS, VALUE),
        "index_query": (INDEX_HEADS, DIM),
        "index_key": (DIM,),
        "index_weights": (INDEX_HEADS,),
    }
    made = {name: torch.randn(tokens, *shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def sequences(stream: Any) -> Iterator[Tensor]:
    """Places of the fed tokens of each response's sequence."""
    return (one.places for one in stream.laid)


def index_scores(given: dict[str, Tensor], places: Tensor) -> Tensor:
    """`[T, T]` of one sequence, by the published formula."""
    query, key, weights = (given[name][places] for name in ("index_query", "index_key", "index_weights"))
    return (torch.einsum("shd,td->sht", query, key).clamp(min=0) * weights[..., None]).sum(1)


def chosen_of(scores: Tensor) -> Tensor:
    """bool `[T, T]`, query by query: the best keys at or before it, of equal ones the first."""
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    for at, row in enumerate(scores):
        ranked = sorted(range(at + 1), key=lambda key, row=row: (-float(row[key]), key))
        chosen[at, ranked[:TOP_K]] = True
    return chosen


def attended(given: dict[str, Tensor], places: Tensor, chosen: Tensor) -> Tensor:
    """`[h, T, T]`: how much of each key the queries of a sequence take."""
    scores = torch.einsum("shd,thd->hst", given["query"][places], given["key"][places]) * SCALE
    return scores.masked_fill(~chosen, -torch.inf).softmax(-1)


@pytest.mark.parametrize("at_once", [2**22, 1, 700])
@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_queries_attend_to_the_keys_of_the_highest_scores(
    monkeypatch: pytest.MonkeyPatch, at_once: int, cp: int, rank: int
) -> None:
    monkeypatch.setattr(calls, "CHUNK_ELEMENTS", at_once)
    stream, share, order = laid(cp, rank)
    given = inputs(len(stream.token_ids))
    expected = torch.zeros(len(stream.token_ids), HEADS, VALUE, dtype=torch.float64)
    for places in sequences(stream):
        shares = attended(given, places, chosen_of(index_scores(given, places)))
        whole = torch.einsum("hst,thv->shv", shares, given["value"][places])
        expected = expected.index_copy(0, places, whole)
    asked = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine, gathered = share.positions, share.layout.flatten()
    (expected[mine] * asked[mine]).sum().backward()
    wanted = {name: given[name].grad.clone() for name in ("query", "key", "value")}
    for tensor in given.values():
        tensor.grad = None

    scored = Scored(given["index_query"][mine], given["index_key"][gathered], given["index_weights"][mine])
    choices = choose(scored, order, TOP_K, Alone())
    found = _ToChosenKeys.apply(
        given["query"][mine], given["key"][gathered], given["value"][gathered], choices, order.calls, SCALE
    )
    assert choices.dtype == torch.int32
    assert choices.shape[1] == TOP_K
    torch.testing.assert_close(found, expected[mine], rtol=1e-12, atol=1e-12)
    (found * asked[mine]).sum().backward()
    for name, gradient in wanted.items():
        torch.testing.assert_close(given[name].grad, gradient, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("at_once", [2**22, 700])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 1)])
def test_the_indexers_loss_is_the_divergence_of_its_scores_from_attention(
    monkeypatch: pytest.MonkeyPatch, at_once: int, sparse: bool, cp: int, rank: int
) -> None:
    monkeypatch.setattr(calls, "CHUNK_ELEMENTS", at_once)
    stream, share, order = laid(cp, rank)
    given = inputs(len(stream.token_ids))
    mine, gathered = share.positions, share.layout.flatten()
    is_mine = torch.zeros(len(stream.token_ids), dtype=torch.float64).index_fill_(0, mine, 1.0)
    expected = torch.zeros((), dtype=torch.float64)
    for places in sequences(stream):  # a token that several sequences share counts once for each
        scores = index_scores(given, places)
        compared = chosen_of(scores) if sparse else torch.ones(scores.shape, dtype=torch.bool).tril()
        target = attended(given, places, compared).detach().sum(0) / HEADS
        predicted = scores.masked_fill(~compared, -torch.inf).softmax(-1)
        terms = torch.where(compared, target * (target / predicted.where(compared, 1.0)).log(), 0.0)
        expected = expected + (terms.sum(-1) * is_mine[places]).sum()
    expected.backward()
    names = ("index_query", "index_key", "index_weights")
    wanted = {name: given[name].grad.clone() for name in names}
    for tensor in given.values():
        tensor.grad = None

    scored = Scored(given["index_query"][mine], given["index_key"][gathered], given["index_weights"][mine])
    choices = choose(scored, order, TOP_K, Alone()) if sparse else None
    told = Attended(given["query"][mine].detach(), given["key"][gathered].detach(), choices, SCALE, Alone())
    found = indexer_loss(scored, told, order)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0.0)  # weights are float32
    found.backward()
    for name in names:
        torch.testing.assert_close(given[name].grad, wanted[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_chooses_what_that_of_transformers_does(family: str) -> None:
    model, length = hugging_face(family), 24
    config, theirs = model.config, model.model.layers[0].self_attn.indexer
    sizes = {"dsa_indexer_n_heads": config.index_n_heads, "dsa_indexer_head_dim": config.index_head_dim}
    kept = {"params_dtype": torch.float32, "sequence_parallel": False}
    ours_config: Any = SimpleNamespace(q_lora_rank=config.q_lora_rank, hidden_size=config.hidden_size, **sizes, **kept)
    ours = Indexer(ours_config, rotates_pairs=family == "glm_moe_dsa", tp_group=Alone())
    names = {"wq_b": "linear_wq_b", "wk": "linear_wk", "k_norm": "k_norm", "weights_proj": "linear_weights_proj"}
    for name, own in names.items():
        getattr(ours, own).load_state_dict(getattr(theirs, name).state_dict())
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(length, config.hidden_size, generator=generator)
    latent = torch.randn(length, config.q_lora_rank, generator=generator)
    cos, sin = model.model.rotary_emb(hidden[None], torch.arange(length)[None])
    mask = torch.full((length, length), -torch.inf).triu(1)[None]
    expected = theirs(hidden[None], latent[None], (cos, sin), mask, None)[0].long()

    half = config.qk_rope_head_dim // 2
    rotation = Rotation(*(wave[0, :, None, None, :half] for wave in (cos, sin)))
    responses = [Response(0, torch.arange(length), torch.ones(length, dtype=torch.bool))]
    stream = pack([Unit(torch.arange(1), responses)])
    order = indexed_order(stream, context_parallel_shard(stream, 1, 0), weighted=False)
    scored = ours(hidden[:, None], latent[:, None], rotation, Alone())
    found = choose(scored, order, config.index_topk, Alone()).long()
    for query in range(length):  # those of the prompt, and of the response behind it, whose first column is the prompt's token
        visible = {key for key in expected[query].tolist() if key <= query}
        assert {*found[query].tolist()} == visible, query


def test_of_equal_scores_the_first_keys_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, -1.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    visible = torch.tensor([[True] * 6, [False, True, True, True, True, False]])
    assert best(scores, visible, 4).tolist() == [
        [True, True, True, False, False, True],
        [False, True, True, True, True, False],
    ]
    assert best(scores, visible, 3).tolist() == [
        [True, True, False, False, False, True],
        [False, True, True, True, False, False],
    ]
    assert columns_of(best(scores, visible, 3), 4).tolist() == [[0, 1, 5, 0], [1, 2, 3, 1]]


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_no_tensor_has_an_element_for_each_pair_of_a_query_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    length, budget = 600, 40_000
    monkeypatch.setattr(calls, "CHUNK_ELEMENTS", budget)
    mask = torch.ones(length // 2 + 1, dtype=torch.bool)
    stream = pack([Unit(torch.arange(length // 2), [Response(0, torch.arange(length // 2 + 1), mask)])])
    share = context_parallel_shard(stream, 1, 0)
    given = inputs(len(stream.token_ids))
    with Largest() as largest:
        order = indexed_order(stream, share, weighted=True)
        scored = Scored(given["index_query"], given["index_key"], given["index_weights"])
        choices = choose(scored, order, TOP_K, Alone())
        told = Attended(given["query"].detach(), given["key"].detach(), choices, SCALE, Alone())
        loss = indexer_loss(scored, told, order)
        found = _ToChosenKeys.apply(given["query"], given["key"], given["value"], choices, order.calls, SCALE)
        (found.sum() + loss).backward()
    assert budget / 4 < largest.elements <= budget < length**2 / 8
