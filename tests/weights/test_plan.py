"""A reshard plan moves every byte that an engine's rank holds, once, from a rank that has it: for all pairs of layouts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.errors import LayoutError
from megarl.weights.plan import ReshardPlan, Transfer, plan_reshard
from megarl.weights.sglang_targets import EVERY_RANK, EngineTarget
from megarl.weights.template import Transfers
from megarl.weights.verify import verify
from tests.families import FAMILIES
from tests.families.family import VOCAB_SIZE
from tests.weights.layouts import SOURCES, TARGETS, hf_config, random_tensors, shards_of_ranks, source, target

BUCKET_BYTES = 3000  # several buckets per rank, and the embedding in several pieces


def slice_of_rank(name: str, tensor: Tensor, rank: int, to: EngineTarget, family: str) -> Tensor:
    """What SGLang's rank holds of a tensor, by the tensor's name; empty if that is nothing. Without vocabulary padding."""
    config, ranks = hf_config(family), to.tp * to.dp
    if to.whole == "all" or (to.whole == "experts" and ".experts." in name):
        return tensor
    if expert := re.search(r"\.experts\.(\d+)\.", name):
        of_group = ranks // to.ep
        group, place = divmod(rank, of_group)
        experts = np.array_split(np.arange(FAMILIES[family].num_experts), to.ep)[group]
        if int(expert[1]) not in experts:
            return tensor[:0]
        if re.search(r"(down_proj|w2)\.weight", name):
            return tensor.chunk(of_group, dim=1)[place]
        if "down_proj.bias" in name:  # the ranks of an expert add up what they give
            return tensor if place == 0 else tensor[:0]
        return tensor.chunk(of_group)[place]
    heads = rank % to.tp
    if "embed_tokens" in name and family == "gemma3":  # torch's own embedding
        return tensor
    if "embed_tokens" in name or "lm_head" in name:
        place, size = (heads, to.tp) if "embed" in name else (rank, ranks)
        step = -(-VOCAB_SIZE // 64) * 64 // size
        return tensor[place * step : (place + 1) * step]
    of_all_heads = family == "minimax_m2"  # whose norms are shared out as heads are
    if re.search(r"self_attn\.(\d\.)?(q_proj|q_b_proj|kv_b_proj)", name) or (of_all_heads and "q_norm" in name):
        return tensor.chunk(to.tp)[heads]
    if re.search(r"self_attn\.[kv]_proj", name) or (of_all_heads and "k_norm" in name):
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        size = config["v_head_dim"] if family == "mimo_v2" and "v_proj" in name else size
        groups = tensor.split(size)
        if len(groups) >= to.tp:
            return tensor.chunk(to.tp)[heads]
        return groups[heads // (to.tp // len(groups))]
    if "sinks" in name or "attention_sink_bias" in name:
        return tensor.chunk(to.tp)[heads]
    if "o_proj.weight" in name:
        return tensor.chunk(to.tp, dim=1)[heads]
    if re.search("gate_proj|up_proj", name):
        return tensor.chunk(ranks)[rank]
    if "down_proj" in name:
        return tensor.chunk(ranks, dim=1)[rank]
    return tensor  # norms, router, latent down-projections


Held = dict[tuple[int, str], Tensor]
"""(rank of an engine, tensor) -> its slice as a matrix."""


def wanted_by(to: EngineTarget, tensors: dict[str, Tensor], family: str) -> Held:
    """What the ranks of one engine hold."""
    every = {(rank, name): slice_of_rank(name, tensors[name], rank, to, family) for name in tensors for rank in range(to.ranks)}
    return {key: part.reshape(len(part), -1) for key, part in every.items() if part.numel()}


def ranks_of(plan: ReshardPlan, transfer: Transfer) -> Sequence[int]:
    """Which ranks of an engine take a transfer."""
    return range(plan.target.ranks) if transfer.engine_rank == EVERY_RANK else [transfer.engine_rank]


def carried_out(plan: ReshardPlan, shards: list[dict[str, Tensor]]) -> list[Held]:
    """What every engine holds after the copies of a plan; -1 where nothing was written."""
    boxes = {(rank, name): (box[1], box[3]) for rank in range(plan.target.ranks) for name, box in plan.slices(rank).items()}
    held = [{key: torch.full(shape, -1, dtype=torch.int32) for key, shape in boxes.items()} for _ in range(plan.target.engines)]
    written = [{key: tensor.numpy() for key, tensor in of_engine.items()} for of_engine in held]  # the same memory
    for rank, own in enumerate(shards):
        for bucket in plan.sends(rank):
            for t in plan.contents(bucket):
                box = own[t.parameter].numpy()[t.source_row : t.source_row + t.rows, t.source_col : t.source_col + t.cols]
                assert box.shape == (t.rows, t.cols)
                for engine, to in product(bucket.engines, ranks_of(plan, t)):
                    goal = written[engine][to, t.tensor]
                    goal[t.target_row : t.target_row + t.rows, t.target_col : t.target_col + t.cols] = box
    return held


WITHOUT_SERVERS = ("deepseek_v4", "step3p5", "gemma4", "gemma4_moe")
"""Families that are refused for SGLang, and whose tensors its ranks hold in ways of their own."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_SERVERS])
def test_every_rank_of_an_engine_gets_its_slices_of_the_full_tensors_from_every_layout(family: str) -> None:
    tensors = random_tensors(family)
    wanted_of = {name: wanted_by(target(name, family), tensors, family) for name in TARGETS}
    for from_name in SOURCES:
        layout = source(from_name, family)
        shards = shards_of_ranks(tensors, family, layout)
        for to_name, wanted in wanted_of.items():
            to = target(to_name, family)
            plan = plan_reshard(hf_config(family), layout, to, itemsize=4, bucket_bytes=BUCKET_BYTES)
            proof = verify(plan)
            for engine, held in enumerate(carried_out(plan, shards)):
                assert held.keys() == wanted.keys()
                wrong = [key for key in wanted if not torch.equal(held[key], wanted[key])]
                assert wrong == [], f"{from_name} -> {to_name}, engine {engine}"
            assert proof.nbytes == to.engines * sum(part.nbytes for part in wanted.values())


def small_plan(from_name: str = "ep2 etp2", to: EngineTarget | None = None, family: str = "deepseek_v3") -> ReshardPlan:
    layout = source(from_name, family)
    goal = to or target("tp4 ep2", family)
    return plan_reshard(hf_config(family), layout, goal, itemsize=4, bucket_bytes=BUCKET_BYTES)


def changed(plan: ReshardPlan, at: int, by: dict[str, int]) -> ReshardPlan:
    """The plan with numbers added to some columns of one transfer."""
    columns = {name: getattr(plan.transfers, name).copy() for name in by}
    for name, amount in by.items():
        columns[name][at] += amount
    return replace(plan, transfers=replace(plan.transfers, **columns))


def row_of(plan: ReshardPlan, name: str) -> int:
    """The first transfer of a tensor."""
    return int(np.flatnonzero(plan.transfers.tensor == plan.tensors.names.index(name))[0])


EXPERT, DENSE = "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "by", "what"),
    [
        (DENSE, {"engine_rank": 1}, "where the rank does not hold it"),
        (EXPERT, {"engine_rank": 2}, "rank that holds nothing of it"),
        (DENSE, {"target_row": 1}, "where the rank does not hold it"),
        (DENSE, {"row": 1, "target_row": 1}, "where the rank does not hold it"),
        (DENSE, {"source_col": 1}, "does not have it, or not there"),
        (EXPERT, {"source_row": 1}, "does not have it, or not there"),
        (DENSE, {"source": 1}, "does not have it, or not there"),
        (DENSE, {"source": 4}, "does not have its layer or expert"),
        (EXPERT, {"source": 2}, "does not have its layer or expert"),
        (DENSE, {"rows": -1, "nbytes": -32}, "unsent"),
        (DENSE, {"nbytes": -1}, "another size"),
    ],
)
def test_a_plan_with_one_wrong_number_is_refused_by_tensor_ranks_and_layouts(
    tensor: str, by: dict[str, int], what: str
) -> None:
    plan = small_plan()
    row = row_of(plan, tensor)
    with pytest.raises(LayoutError, match=what) as caught:
        verify(changed(plan, row, by))
    assert tensor in str(caught.value)
    assert "training layout tp=4,pp=2,ep=2,etp=2,dp=2, 2 engines of tp=4,ep=2" in str(caught.value)
    assert re.search(r"rank \d", str(caught.value))


def test_a_plan_that_sends_a_byte_twice_or_not_at_all_is_refused() -> None:
    plan = small_plan()
    row = row_of(plan, DENSE)
    keep = np.arange(len(plan.transfers))
    for index, what in ((np.insert(keep, row, row), "is sent twice"), (np.delete(keep, row), "unsent: 0 of ")):
        transfers = Transfers(**{name: column[index] for name, column in vars(plan.transfers).items()})
        other = replace(plan, transfers=transfers, bucket_starts=np.minimum(plan.bucket_starts, len(index)))
        with pytest.raises(LayoutError, match=what):
            verify(other)


def test_a_bucket_left_out_too_large_or_of_two_sources_is_refused() -> None:
    plan = small_plan()
    for starts, what in (
        (plan.bucket_starts[:-1], "each once"),
        (np.delete(plan.bucket_starts, 1), "more than 3000 bytes"),
        (np.delete(plan.bucket_starts, plan.buckets_of(1)[0]), "each once"),
    ):
        with pytest.raises(LayoutError, match=what):
            verify(replace(plan, bucket_starts=starts))


def test_a_rank_that_is_taken_for_another_ones_replica_is_refused() -> None:
    plan = small_plan("ep4 tp2")
    plan.sources.replicas[0] *= 2  # the ranks of the next source would be taken for replicas of this one
    with pytest.raises(LayoutError, match="replica of source"):
        verify(plan)


@pytest.mark.parametrize("engines", [1, 2, 3, 4, 7, 8, 20])
def test_what_ranks_send_is_what_engines_receive_and_replicas_share_it(engines: int) -> None:
    plan = small_plan("cp2 dp3", EngineTarget(tp=2, engines=engines), "llama")  # 6 replicas of the model
    sent = [(bucket.number, engine, rank) for rank in range(6) for bucket in plan.sends(rank) for engine in bucket.engines]
    received = set()
    for engine in range(engines):
        for engine_rank in range(2):
            for bucket in plan.receives(engine, engine_rank):
                assert {transfer.engine_rank for transfer in plan.contents(bucket)} == {engine_rank} == {bucket.engine_rank}
                received.add((bucket.number, engine, bucket.rank))
    assert len(sent) == len(set(sent)) == engines * (len(plan.bucket_starts) - 1)
    assert set(sent) == received
    of_rank = [sum(b.nbytes * len(b.engines) for b in plan.sends(rank)) for rank in range(6)]
    assert max(of_rank) - min(of_rank) <= 2 * BUCKET_BYTES


def test_stages_begin_with_different_engines() -> None:
    plan = plan_reshard(hf_config("llama"), source("pp4", "llama"), EngineTarget(engines=4), itemsize=4)
    assert [[bucket.engines for bucket in plan.sends(rank)] for rank in range(4)] == [
        [(0, 1, 2, 3)], [(1, 2, 3, 0)], [(2, 3, 0, 1)], [(3, 0, 1, 2)],
    ]  # fmt: skip


def test_engines_are_served_by_the_replicas_next_to_them() -> None:
    plan = plan_reshard(hf_config("llama"), source("ep2 dp4", "llama"), EngineTarget(engines=8), itemsize=4)
    assert [{e for bucket in plan.sends(rank) for e in bucket.engines} for rank in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]


def test_what_is_taken_whole_is_recorded_and_makes_the_plan_redundant() -> None:
    names = small_plan().tensors.names
    assert small_plan().taken_whole == []
    assert small_plan(to=EngineTarget(whole="all")).taken_whole == []  # a single rank holds everything
    of_experts = [name for name in names if ".experts." in name]
    plan = small_plan(to=EngineTarget(tp=2, ep=2, whole="experts"))
    assert plan.taken_whole == of_experts
    own, experts = plan.own_bytes, sum(int(plan.tensors.nbytes[names.index(name)]) for name in of_experts)
    assert plan.received_bytes.sum() == own + experts
    whole = [name for name in names if not re.search(r"norm|mlp\.gate\.|q_a_proj|kv_a_proj", name)]
    plan = small_plan(to=EngineTarget(tp=2, whole="all"))
    assert plan.taken_whole == whole
    assert plan.received_bytes.tolist() == [plan.tensors.nbytes.sum()] * 2


@pytest.mark.parametrize(
    ("family", "to", "sentence"),
    [
        ("olmo2", EngineTarget(tp=4), "target tp is 4 .* the model has 4 attention heads, 2 KV heads.*it must be 1 or 2"),
        ("llama", EngineTarget(tp=3), "target tp is 3 .* the model has 4 attention heads, 2 KV heads.*it must be 1, 2 or 4"),
        ("llama", EngineTarget(tp=2, ep=2), "target ep is 2, but the model has no experts; ep must be 1"),
        ("llama", EngineTarget(tp=2, dp=2), "target dp is 2, but SGLang replicates attention .* not for 'llama'; dp must be 1"),
        ("mixtral", EngineTarget(tp=1, engines=2, ep=1, dp=3), "dp must be 1"),
        ("qwen3_moe", EngineTarget(tp=4, dp=2, ep=8), "target ep is 8, but the model has 4 experts; ep must be 1, 2 or 4"),
        ("qwen3_moe", EngineTarget(tp=4, dp=8), "experts of width 16 over 32 ranks each; it must be 1"),
    ],
)
def test_engines_that_sglang_cannot_start_are_refused_with_the_nearest(family: str, to: EngineTarget, sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        plan_reshard(hf_config(family), source("one rank", family), to)


def test_sizes_that_no_engine_has_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"target ep is 3; it must divide the engine's 4 ranks .*; it must be 1, 2 or 4"):
        EngineTarget(tp=4, ep=3)
    with pytest.raises(LayoutError, match="target engines is 0, but it is at least 1"):
        EngineTarget(engines=0)
    with pytest.raises(LayoutError, match=r"bucket_bytes is 100, but one row of 'model.embed_tokens.weight' has 128 bytes"):
        plan_reshard(hf_config("llama"), source("one rank", "llama"), EngineTarget(), itemsize=4, bucket_bytes=100)


def test_a_bucket_that_no_replica_sends_to_an_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan("cp2 dp3", EngineTarget(tp=2, engines=7), "llama")
    window = ReshardPlan.window
    monkeypatch.setattr(ReshardPlan, "window", lambda *at: (window(*at)[0], window(*at)[1] - 1))
    with pytest.raises(LayoutError, match=r"is sent to engine \d by no replica"):
        verify(plan)
