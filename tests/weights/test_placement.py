"""Every rank and engine has a GPU of its own, close to those it talks to, on whatever nodes are found."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.layout import Layout
from megarl.errors import ClusterError, LayoutError
from megarl.models.registry import load_hf_config
from megarl.weights.engine_line import engine_position, replica_shares
from megarl.weights.placement import Bundle, Placement, PlacementRequest, place, planned_bundles
from megarl.weights.plan import plan_reshard
from megarl.weights.sglang_targets import EngineTarget

LLAMA = Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b"
SIZES = (1, 2, 4, 8)


def cluster(sizes: list[int], seed: int) -> list[Bundle]:
    """Nodes of these sizes, some numbers between missing, in the order in which a reservation may give them."""
    numbers = random.Random(seed).sample(range(2 * len(sizes)), len(sizes))
    bundles = [Bundle(f"10.0.0.{number}", gpu) for number, size in zip(numbers, sizes, strict=True) for gpu in range(size)]
    random.Random(seed + 1).shuffle(bundles)
    return bundles


def nodes_of(placement: Placement, bundles: tuple[int, ...] | list[int]) -> set[str]:
    return {placement.bundles[bundle].node for bundle in bundles}


def groups_of(layout: Layout, *fixed: str) -> list[list[int]]:
    """The ranks that differ in nothing but what is not in `fixed`."""
    found = defaultdict(list)
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        found[tuple(getattr(at, name) for name in fixed)].append(rank)
    return list(found.values())


@st.composite
def requests(draw: st.DrawFn) -> tuple[PlacementRequest, list[Bundle]]:
    """A run that takes every GPU of 1 to 256 nodes of 4 or 8, and its shuffled bundles."""
    nodes, size = draw(st.integers(1, 256)), draw(st.sampled_from((4, 8)))
    gpus, colocated = nodes * size, draw(st.booleans())
    engine_tp = draw(st.sampled_from([tp for tp in SIZES if tp <= size]))
    engine_gpus = gpus if colocated else draw(st.integers(1, max(1, gpus // 2))) // engine_tp * engine_tp
    layouts = {}
    left = gpus if colocated else gpus - engine_gpus
    for name in ("policy", "critic")[: draw(st.integers(1, 2))]:
        within = draw(st.sampled_from([tp for tp in SIZES if tp <= size and tp <= max(left, 1)]))
        tp = draw(st.sampled_from([tp for tp in SIZES if within % tp == 0]))
        blocks = (left if colocated or name == "critic" else left // 2) // within
        pp = draw(st.sampled_from([pp for pp in (1, 2, 3, 4) if max(blocks, 1) % pp == 0]))
        dp = max(blocks, 1) // pp
        ep = draw(st.sampled_from([ep for ep in SIZES if (within * dp) % ep == 0]))
        layouts[name] = Layout(tp=tp, cp=within // tp, dp=dp, pp=pp, ep=ep)
        left -= 0 if colocated else layouts[name].world_size
    request = PlacementRequest(layouts, engine_gpus // engine_tp, engine_tp if engine_gpus else 1, colocated)
    full, rest = divmod(request.bundles, size)
    return request, cluster([size] * full + [rest] * bool(rest), draw(st.integers(0, 2**20)))


@settings(max_examples=40, deadline=None)
@given(requests(), st.integers(0, 2**20))
def test_groups_lie_within_nodes_engines_on_neighbours_and_every_gpu_is_used_as_planned(
    made: tuple[PlacementRequest, list[Bundle]], seed: int
) -> None:
    request, bundles = made
    placement = place(request, bundles)
    used = Counter[int]()
    for name, layout in request.groups.items():
        ranks = placement.ranks[name]
        assert len(set(ranks)) == layout.world_size
        used.update(ranks)
        for group in groups_of(layout, "dp", "pp"):  # tensor- and context-parallel neighbours
            assert len(nodes_of(placement, [ranks[rank] for rank in group])) == 1
    for places in placement.engines:
        assert len(nodes_of(placement, places)) == 1
        first = placement.gpus(places)[0]
        assert placement.gpus(places) == tuple(range(first, first + request.engine_tp))
    of_engines = Counter(bundle for places in placement.engines for bundle in places)
    assert set(of_engines.values()) <= {1}
    if request.colocated:
        assert len(used | of_engines) == request.bundles
    else:
        assert used + of_engines == Counter(range(request.bundles))
    again = list(bundles)
    random.Random(seed).shuffle(again)
    assert gpus_of(place(request, again)) == gpus_of(placement)


def gpus_of(placement: Placement) -> tuple[object, ...]:
    """What a placement says, without the numbers of bundles."""
    where = placement.bundles
    ranks = {name: [where[bundle] for bundle in bundles] for name, bundles in placement.ranks.items()}
    return ranks, [[where[bundle] for bundle in bundles] for bundles in placement.engines], placement.rows()


def test_experts_stay_within_a_node_and_stages_follow_each_other() -> None:
    layout = Layout(tp=2, dp=8, pp=4, ep=8)
    placement = place(PlacementRequest({"policy": layout}, 0, 1, True), cluster([8] * 8, seed=3))
    ranks = placement.ranks["policy"]
    for group in groups_of(layout, "edp", "pp"):
        assert len(nodes_of(placement, [ranks[rank] for rank in group])) == 1
    stages = [nodes_of(placement, [ranks[rank] for rank in group]) for group in groups_of(layout, "pp")]
    assert [len(nodes) for nodes in stages] == [2] * 4
    assert len(set.union(*stages)) == 8


@pytest.mark.parametrize(("layout", "fixed"), [
    (Layout(tp=4, dp=3), ("dp", "pp")), (Layout(tp=2, cp=2, dp=3), ("dp", "pp")), (Layout(dp=12, ep=4), ("edp", "pp")),
])  # fmt: skip
def test_the_rest_of_a_node_is_left_to_others_where_a_group_would_be_cut(layout: Layout, fixed: tuple[str, ...]) -> None:
    placement = place(PlacementRequest({"policy": layout}, 4, 1, False), cluster([6, 6, 4], seed=5))
    for group in groups_of(layout, *fixed):
        assert len(nodes_of(placement, [placement.ranks["policy"][rank] for rank in group])) == 1
    assert len({*placement.ranks["policy"], *(bundle for places in placement.engines for bundle in places)}) == 16


def test_what_needs_many_gpus_of_a_node_is_placed_before_what_fits_anywhere() -> None:
    placement = place(PlacementRequest({"policy": Layout(dp=3)}, 3, 4, False), cluster([8, 7], seed=4))
    assert [len(nodes_of(placement, places)) for places in placement.engines] == [1, 1, 1]


def test_context_parallel_groups_larger_than_a_node_leave_tensor_parallel_ones_whole() -> None:
    layout = Layout(tp=4, cp=4)
    placement = place(PlacementRequest({"policy": layout}, 0, 1, True), cluster([8, 8], seed=1))
    for group in groups_of(layout, "cp", "dp", "pp"):
        assert len(nodes_of(placement, [placement.ranks["policy"][rank] for rank in group])) == 1


@pytest.mark.parametrize(("layout", "engines", "engine_tp"), [
    (Layout(tp=2, dp=4), 8, 1), (Layout(tp=2, dp=4), 4, 2), (Layout(dp=8), 8, 1), (Layout(dp=8), 4, 1), (Layout(dp=8), 2, 4),
    (Layout(tp=2, cp=2, dp=2, pp=2), 16, 1), (Layout(tp=2, dp=2, pp=4), 4, 2), (Layout(dp=6), 2, 2),
])  # fmt: skip
def test_a_colocated_engine_is_on_gpus_of_ranks_that_send_most_to_it(layout: Layout, engines: int, engine_tp: int) -> None:
    plan = plan_reshard(load_hf_config(str(LLAMA)), layout, EngineTarget(tp=engine_tp, engines=engines))
    request = PlacementRequest({"policy": layout}, engines, engine_tp, True)
    placement = place(request, cluster([min(8, layout.world_size)] * max(1, layout.world_size // 8), seed=2))
    for engine, places in enumerate(placement.engines):
        sent: Counter[int] = Counter()
        for engine_rank in range(engine_tp):
            for bucket in plan.receives(engine, engine_rank):
                sent[bucket.rank % (layout.world_size // layout.pp) // layout.tp] += bucket.nbytes  # by replica
        here = {placement.ranks["policy"].index(bundle) for bundle in places}
        replicas = {rank % (layout.world_size // layout.pp) // layout.tp for rank in here}
        assert sum(sent[replica] for replica in replicas) >= 0.45 * sent.total()


@given(st.integers(1, 40), st.integers(1, 40))
def test_shares_are_those_of_the_reshard_plans_line(replicas: int, engines: int) -> None:
    shares = [replica_shares(engine, replicas, engines) for engine in range(engines)]
    assert all(sum(share.values()) == replicas for share in shares)
    assert Counter({r: n for s in shares for r, n in s.items()}).keys() == set(range(replicas))
    totals: Counter[int] = Counter()
    for share in shares:
        totals.update(share)
    assert totals == dict.fromkeys(range(replicas), engines)  # every replica sends as much
    at = engine_position(np.arange(engines), np.array(replicas), engines)
    assert sorted(at.tolist()) == list(range(engines))
    assert at.tolist() == [engine_position(engine, replicas, engines) for engine in range(engines)]
    for engine, share in enumerate(shares):  # as ReshardPlan.replica has it, of a bucket at any place in the engine's part
        for middle in (0.01, 0.5, 0.99):
            assert int((at[engine] + middle) * replicas / engines) in share


@pytest.mark.parametrize(("spaced", "gpus", "fits"), [
    (2, (0, 2, 4, 6), True), (1, (4, 5, 6, 7), True), (0, (0, 1, 3, 7), False), (0, (0, 3, 4, 5, 6), True),
])  # fmt: skip
def test_engines_take_evenly_spaced_gpus_of_what_others_left(spaced: int, gpus: tuple[int, ...], fits: bool) -> None:
    request = PlacementRequest({}, 1, 4, False)
    bundles = [Bundle("a", gpu) for gpu in gpus]
    if not fits:
        with pytest.raises(ClusterError, match=r"rollout\.tp is 4, which needs 4 neighbouring GPUs of one node 1 times"):
            place(request, bundles)
        return
    placement = place(request, bundles)
    found = placement.gpus(placement.engines[0])
    assert len({b - a for a, b in pairwise(found)}) == 1
    assert set(found) <= set(gpus)


@pytest.mark.parametrize(("request_", "sizes", "kind", "sentence"), [
    (PlacementRequest({"policy": Layout(tp=16)}, 0, 1, True), [8, 8], LayoutError,
     "policy.layout.tp is 16, which is more than the 8 GPUs of a node; it must be 1, 2, 4 or 8"),
    (PlacementRequest({"policy": Layout(dp=16)}, 1, 16, True, over_nodes=False), [8, 8], ClusterError,
     "rollout.tp is 16, which is more than the 8 GPUs of a node, and engines of this kind cannot be on several nodes; it must "
     "be 1, 2, 4 or 8"),
    (PlacementRequest({"policy": Layout(dp=24)}, 1, 11, True), [8, 8, 8], ClusterError,
     "rollout.tp is 11, which is more than the 8 GPUs of a node, and no number of nodes can share it evenly with at most 8 "
     "each; it must be 1, 2, 4 or 8"),
    (PlacementRequest({"policy": Layout(dp=20)}, 1, 16, True), [8, 3, 3, 3, 3], ClusterError,
     "rollout.tp is 16, which needs 8 neighbouring GPUs of each of 2 nodes 1 times, but the nodes have room for 0 such"),
    (PlacementRequest({"critic": Layout(tp=3, dp=4)}, 0, 1, True), [8, 4], LayoutError,
     "critic.layout.tp is 3, which needs 3 GPUs of one node 4 times (tp * cp = 3 * 1), but the nodes have 4 or 8 GPUs for "
     "critic; it must be a size that divides the GPUs of every node"),
    (PlacementRequest({"policy": Layout(cp=3, dp=4)}, 0, 1, True), [8, 4], LayoutError, "policy.layout.cp is 3, which needs"),
    (PlacementRequest({"policy": Layout(dp=12)}, 4, 3, True), [8, 4], ClusterError,
     "rollout.tp is 3, which needs 3 neighbouring GPUs of one node 4 times, but the nodes have room for 3 such engines"),
])  # fmt: skip
def test_what_cannot_be_placed_is_one_sentence(
    request_: PlacementRequest, sizes: list[int], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        place(request_, cluster(sizes, seed=7))
    assert sentence in str(caught.value)
    assert caught.value.facts is not None  # type: ignore[attr-defined]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.sampled_from((2, 3, 4)), st.sampled_from((4, 8)), st.booleans(), st.integers(0, 2**20))
def test_an_engine_larger_than_a_node_has_equal_shares_of_as_few_nodes_as_can_hold_it(
    engines: int, nodes_each: int, size: int, colocated: bool, seed: int
) -> None:
    gpus = engines * nodes_each * size
    request = PlacementRequest({"policy": Layout(tp=size, dp=engines)}, engines, nodes_each * size, colocated)
    trained = 0 if colocated else engines
    placement = place(request, cluster([size] * (gpus // size + trained), seed))
    for engine in range(engines):
        of_nodes = placement.engine_nodes(engine)
        assert sum(of_nodes, ()) == placement.engines[engine]  # in the order of ranks
        assert [placement.gpus(bundles) for bundles in of_nodes] == [tuple(range(size))] * nodes_each
        assert len({placement.bundles[bundles[0]].node for bundles in of_nodes}) == nodes_each
    used = Counter(bundle for places in placement.engines for bundle in places)
    assert set(used.values()) == {1}
    assert colocated or not used.keys() & set(placement.ranks["policy"])


def test_engines_over_nodes_leave_no_gpu_that_another_could_have() -> None:
    wide = place(PlacementRequest({}, 3, 14, False), cluster([6] * 7, seed=1))  # two each of seven nodes
    assert [[len(bundles) for bundles in wide.engine_nodes(engine)] for engine in range(3)] == [[2] * 7] * 3
    assert len({bundle for places in wide.engines for bundle in places}) == 42
    sizes = [6, 6, 6, 6, 4, 4, 4, 2, 2, 2]  # seven nodes with two each are found three times if fuller ones are taken first
    assert len(place(PlacementRequest({}, 3, 14, False), cluster(sizes, seed=2)).engines) == 3
    uneven = place(PlacementRequest({}, 1, 16, False), cluster([8, 4, 4, 4], seed=1))  # 8 each are not to be had of two
    assert [len(bundles) for bundles in uneven.engine_nodes(0)] == [4, 4, 4, 4]


def test_a_cluster_without_gpus_is_one_node() -> None:
    bundles = [Bundle(f"10.0.0.{number}", None) for number in (10, 9, 2)]
    placement = place(PlacementRequest({"policy": Layout(tp=3)}, 1, 3, True), bundles)
    assert placement.ranks["policy"] == placement.engines[0] == (2, 1, 0)
    assert placement.gpus(placement.engines[0]) == ()


def test_engines_elsewhere_take_no_room() -> None:
    placement = place(PlacementRequest({"policy": Layout(dp=4)}, 2, 0, False), planned_bundles(4, 8))
    assert placement.engines == ((), ())
    assert placement.engine_nodes(1) == []


def test_rows_and_summary_say_who_is_where() -> None:
    request = PlacementRequest({"policy": Layout(tp=4, dp=4)}, 4, 2, False)
    placement = place(request, planned_bundles(request.bundles, 8))
    assert placement.rows() == [
        ("node 0", "0-7", {"policy": "0-7", "engines": ""}),
        ("node 1", "0-7", {"policy": "8-15", "engines": ""}),
        ("node 2", "0-7", {"policy": "", "engines": "0-3"}),
    ]
    assert placement.summary() == "3 nodes with 8 GPUs each; by node: policy 0-1, engines 2"
    assert placement.as_json()["engines"][1] == [
        {"bundle": 18, "node": "node 2", "gpu": 2}, {"bundle": 19, "node": "node 2", "gpu": 3}
    ]  # fmt: skip


def test_lent_engines_are_on_gpus_of_ranks_near_those_that_send_to_them() -> None:
    layouts = {"policy": Layout(tp=2, dp=4), "critic": Layout(tp=2, dp=1)}
    request = PlacementRequest(layouts, 2, 2, colocated=False, lent=3)
    assert (request.bundles, request.processes_per_bundle) == (8 + 2 + 4, 2)
    bundles = planned_bundles(14, 8)
    placement = place(request, bundles)
    without = place(PlacementRequest(layouts, 2, 2, colocated=False), bundles)
    assert placement.ranks == without.ranks
    assert placement.engines[:2] == without.engines
    own = {bundle for engine in placement.engines[:2] for bundle in engine}
    lent = placement.engines[2:]
    held = {bundle for ranks in placement.ranks.values() for bundle in ranks}
    assert len(lent) == 3
    assert len({bundle for engine in lent for bundle in engine}) == 6, "a GPU is lent to one engine"
    assert {bundle for engine in lent for bundle in engine} <= held - own
    for number, engine in enumerate(lent, start=2):
        replicas = replica_shares(number, 4, 5)
        senders = {placement.ranks["policy"][2 * replica + at] for replica in replicas for at in range(2)}
        assert senders & {*engine}
        assert len(nodes_of(placement, engine)) == 1


def test_more_lent_engines_than_have_room_are_one_sentence() -> None:
    request = PlacementRequest({"policy": Layout(tp=1, dp=3)}, 1, 2, colocated=False, lent=2)
    with pytest.raises(ClusterError, match=r"schedule.lent_engines is 2, which of 2 neighbouring GPUs each have no room"):
        place(request, planned_bundles(5, 5))
