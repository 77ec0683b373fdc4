"""Context parallelism and pipelines change where a token is computed, never what: log-probs, entropies, values, collision
probabilities and every gradient element are those of one rank and of Hugging Face, and recomputation changes no bit of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import Response, ScorePosition, Unit, split_shared_prompts
from megarl.errors import LayoutError
from megarl.megatron.options import ModelOptions
from tests.world import World

VOCAB = 131
TEMPERATURE = 0.7
LAYOUTS = {
    "pp2": Layout(pp=2),
    "vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "cp4": Layout(cp=4),
    "tp2+sp·cp2": Layout(tp=2, cp=2, sequence_parallel=True),
    "pp2·cp2": Layout(pp=2, cp=2),
    "vpp2·cp2": Layout(pp=2, vpp=2, cp=2),
    "dp2·cp2": Layout(dp=2, cp=2),
}
CASES = {
    # name: head, shared prompts, units per micro-batch, recomputation, token multiple
    "packed, shared prompts": ("log_probs", True, 4, "none", 1),
    "packed": ("log_probs", False, 4, "none", 8),
    "one unit at a time": ("log_probs", True, 1, "none", 1),
    "recomputed": ("log_probs", True, 4, "full", 1),
    "attention recomputed": ("log_probs", True, 4, "selective", 1),
    "values": ("value", True, 4, "none", 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Llama with a scalar head as a Hugging Face folder; norms are random too."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, num_labels=1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "llama"
    for kind, name in ((transformers.LlamaForCausalLM, "log_probs"), (transformers.LlamaForSequenceClassification, "value")):
        torch.manual_seed(0)
        model = kind._from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(path / name)
    return path


def units(dp: int, head: str) -> list[list[Unit]]:
    """Per data-parallel rank its prompts: shorter than 2·cp and longer, single tokens, masks with holes and without a token."""
    generator = torch.Generator().manual_seed(7)

    def ids(length: int) -> Tensor:
        return torch.randint(0, VOCAB, (length,), generator=generator)

    lengths = [(3, (1, 9, 4)), (1, (2, 1)), (13, (21, 1, 6)), (5, (1,)), (2, (17,)), (9, (3, 8, 1)), (6, (7, 2)), (4, (1, 1))]
    found, index = [], 0
    for prompt, responses in lengths:
        made = []
        for length in responses:
            mask = torch.rand(length, generator=generator) < 0.8
            if head == "value":
                mask = torch.arange(length) == length - 1
            made.append(Response(index, ids(length), mask, {"weights": torch.randn(length, generator=generator) / 20}))
            index += 1
        found.append(Unit(ids(prompt), made))
    return [found[rank::dp] for rank in range(dp)]


def objective(output: Tensor, stream: Any) -> tuple[Tensor, dict[str, float]]:
    """Sums over responses are squared, so that no rank's part of the loss stands alone."""
    number = torch.repeat_interleave(torch.arange(len(stream.owners)), torch.tensor([len(p) for _, p, _ in stream.owners]))
    weighted = stream.columns["weights"] * (output * torch.tensor([1.0, 0.3])[: output.shape[1]]).sum(1)
    sums = weighted.new_zeros(len(stream.owners)).index_add(0, number, weighted)
    return -sums.square().sum() - sums.sum(), {"tokens": float(len(output))}


def run_cases(rank: int, world_size: int, folder: str, layout: Layout, names: list[str]) -> dict[str, Any]:
    """By case: `values` by response, metric sums, and `gradients` by hub name on each stage's leading rank."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward

    initialize_layout(layout, seed=1)
    answers = {}
    for name in names:
        head, shared, per_micro_batch, recompute, multiple = CASES[name]
        options = ModelOptions(
            f"{folder}/{head}", layout, head=head, temperature=TEMPERATURE, logit_chunk_tokens=5, recompute=recompute,
            token_multiple=multiple, collision=head == "log_probs",
        )  # fmt: skip
        role = RankModel(options, OptimizerOptions(lr=1e-3))
        mine = units(layout.dp, head)[layout.coords(rank).dp]
        mine = mine if shared else split_shared_prompts(mine)
        micro_batches = [mine[at : at + per_micro_batch] for at in range(0, len(mine), per_micro_batch)]
        position = ScorePosition.AT if head == "value" else ScorePosition.NEXT
        values = role.forward(micro_batches, position=position)
        for chunk in role.chunks:
            chunk.train()
        metrics = forward_backward(role.chunks, options, micro_batches, objective, position=position)
        answers[name] = {"values": values, "metrics": metrics if role.reports else {}, "gradients": gradients(role)}
    return answers


def gradients(role: Any) -> dict[str, Tensor]:
    """Gradients take the weights' places and are exported like them, after each rank has got the others' shards."""
    for chunk in role.chunks:
        for buffer in chunk.buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=group)
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    return {name: tensor.clone() for name, tensor in role.export()}


def hugging_face(folder: Path, head: str) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """(values by response, gradients by name): each response alone behind its prompt."""
    kind = transformers.LlamaForCausalLM if head == "log_probs" else transformers.LlamaForSequenceClassification
    model = kind.from_pretrained(folder / head, dtype=torch.float32)
    values = {}
    for unit in split_shared_prompts(units(1, head)[0]):
        (response,) = unit.responses
        ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
        start, further = len(unit.prompt_ids), torch.zeros(len(response.token_ids), 0)
        if head == "value":
            output = model.score(model.model(ids).last_hidden_state[0, start:])
        else:
            log_p = (model(ids).logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1)
            picked = log_p.gather(1, response.token_ids[:, None])
            output = torch.cat([picked, -(log_p.exp() * log_p).sum(-1, keepdim=True)], dim=1)
            further = log_p.detach().exp().square().sum(-1, keepdim=True)
        scored = (output * torch.tensor([1.0, 0.3])[: output.shape[1]]).sum(1)
        total = (response.columns["weights"] * scored)[response.mask].sum()
        (-total.square() - total).backward()
        values[response.index] = torch.cat([output.detach(), further], dim=1) * response.mask[:, None]
    return values, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def joined(answers: list[dict[str, Any]], case: str, what: str) -> dict[Any, Any]:
    """What the ranks gave, together; nothing may come twice."""
    whole: dict[Any, Any] = {}
    for answer in answers:
        assert not whole.keys() & answer[case][what].keys()
        whole |= answer[case][what]
    return whole


def check(found: dict[Any, Tensor], expected: dict[Any, Tensor], what: str) -> None:
    """Element by element, to 1e-5 of the largest element of each tensor (of 1, if that is larger: nats)."""
    assert found.keys() == expected.keys(), what
    for name, wanted in expected.items():
        size = float(wanted.abs().max()) if what.endswith("gradients") else max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-5 * size, msg=lambda m, n=name: f"{what}, {n}: {m}")


@pytest.fixture(scope="module")
def one_rank(world: World, folder: Path) -> list[dict[str, Any]]:
    return world.call(run_cases, str(folder), Layout(), list(CASES), size=1)


@pytest.fixture(scope="module")
def hub(folder: Path) -> dict[str, tuple[dict[int, Tensor], dict[str, Tensor]]]:
    return {head: hugging_face(folder, head) for head in ("log_probs", "value")}


@pytest.mark.parametrize("case", CASES)
def test_one_rank_computes_what_hugging_face_computes(one_rank: list[dict[str, Any]], hub: Any, case: str) -> None:
    values, by_name = hub[CASES[case][0]]
    check(joined(one_rank, case, "values"), values, f"{case}, values")
    check(joined(one_rank, case, "gradients"), by_name, f"{case}, gradients")


IN_PARITY = ("cp4", "pp2·cp2", "dp2·cp2")
"""tests/themes/parallel computes the gradients of these, or of their parts, and the others here the rest of the cases."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive if n in IN_PARITY else ()) for n in LAYOUTS])
def test_every_layout_computes_what_one_rank_and_hugging_face_compute_and_recomputes_the_same_bits(
    world: World, one_rank: list[dict[str, Any]], hub: Any, folder: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    answers = world.call(run_cases, str(folder), layout, list(CASES), size=layout.world_size)
    for case in CASES:
        values, by_name = hub[CASES[case][0]]
        for what, of_hub in (("values", values), ("gradients", by_name)):
            found = joined(answers, case, what)
            check(found, joined(one_rank, case, what), f"{name}, {case}, one rank, {what}")
            check(found, of_hub, f"{name}, {case}, Hugging Face, {what}")
        tokens = sum(answer[case]["metrics"].get("tokens", 0.0) for answer in answers)
        assert tokens == one_rank[0][case]["metrics"]["tokens"]
        if CASES[case][3] != "none":
            for what in ("values", "gradients"):
                found, kept = (joined(answers, of, what) for of in (case, "packed, shared prompts"))
                assert all(torch.equal(tensor, kept[key]) for key, tensor in found.items()), f"{case} changes {what}"


def test_megatron_cores_local_spec_is_refused_where_sequences_are_split() -> None:
    with pytest.raises(LayoutError, match=r"cp is 2, which the layers of model\.layer_spec = 'local' do not support"):
        ModelOptions("folder", Layout(cp=2), layer_spec="local")
    with pytest.raises(LayoutError, match=r"sequence_parallel is true, which the layers of model\.layer_spec = 'local'"):
        ModelOptions("folder", Layout(tp=2, sequence_parallel=True), layer_spec="local")


class GroupOf:
    """A process group as far as megatron-core's rotary embedding asks: its size, and this rank."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed_lengths_and_token_order_are_those_of_megatron_cores_rotary_embedding(cp: int) -> None:
    """megatron-core cuts the rotary angles of packed sequences by itself: our tokens must be in the order it assumes."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    from megarl.data.stream import context_parallel_shard, pack
    from megarl.megatron.step import packed_lengths

    alone = split_shared_prompts(units(1, "log_probs")[0])
    stream = pack(alone, pad_to_multiple=40 * cp, segment_multiple=2 * cp if cp > 1 else 1)
    packed = packed_lengths(stream, torch.device("cpu"))
    lengths = [len(unit.prompt_ids) + len(unit.responses[0].token_ids) - 1 for unit in alone]
    padded = [-(-length // (2 * cp)) * 2 * cp if cp > 1 else length for length in lengths]
    ends = torch.tensor(padded).cumsum(0).tolist()
    expected = [0, *ends] + ([len(stream.token_ids)] if ends[-1] < len(stream.token_ids) else [])
    assert packed.qkv_format == "thd"
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(packed, name).dtype == torch.int32
        assert getattr(packed, name).tolist() == expected
    longest = max(end - start for start, end in pairwise(expected))
    assert packed.max_seqlen_q == packed.max_seqlen_kv == longest
    angles = torch.outer(torch.arange(float(longest)), torch.tensor([1.0, 0.1]))[:, None, None].repeat(1, 1, 1, 2)
    for rank in range(cp):
        share = context_parallel_shard(stream, cp, rank)
        ones = torch.ones(len(share.positions), 1, 4)
        turned = _apply_rotary_pos_emb_thd(ones, packed.cu_seqlens_q_padded, angles, cp_group=GroupOf(cp, rank))
        places = torch.cat([torch.arange(end - start) for start, end in pairwise(expected)])
        at = angles[places[share.positions], 0]
        assert torch.equal(turned, ones * at.cos() + torch.tensor([-1.0, -1.0, 1.0, 1.0]) * at.sin())
        own = [segment.start + offset for segment in stream.segments for offset in range(segment.length)]
        real = torch.isin(share.positions, torch.tensor(own))
        assert torch.equal(stream.position_ids[share.positions][real], places[share.positions][real])
