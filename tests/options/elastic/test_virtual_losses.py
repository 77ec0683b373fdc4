"""Losses at moments that real runs seldom meet, in virtual time: megarl's own state machines, with answers in place of Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.virtual_ranks import Cluster, Failure, Group, in_place_of_ray, replacement, run_of
from megarl.config.layout import Layout
from megarl.errors import RankLostError, WorkerError
from megarl.options.elastic.memory import _buddies

SECONDS = {
    "repair": 1000.0, "notice process": 1.0, "notice node": 3.0, "notice hang": 60.0, "start process": 10.0, "leave": 1.0,
    "become": 2.0, "connect": 3.0, "copy": 1.0, "send": 5.0, "load weights": 4.0, "put back": 2.0,
}  # fmt: skip
LAYOUT = Layout(pp=2, dp=4)
GENERATE_S, TRAIN_S = 50.0, 20.0
Played = tuple[Any, Group, Cluster]


@pytest.fixture
def played() -> Iterator[Callable[..., Played]]:
    """A run on as many nodes as it has ranks, and `spares` more."""
    with ExitStack() as stack:

        def start(*failures: Failure, spares: int = 1) -> Played:
            cluster = Cluster(LAYOUT.world_size, spares, SECONDS, failures)
            stack.enter_context(in_place_of_ray(cluster))
            recovery, group = replacement(cluster, LAYOUT, spares, shrink=True)
            return recovery, group, cluster

        yield start


def test_a_run_that_started_again_with_fewer_replicas_has_them_back_one_by_one() -> None:
    cluster = Cluster(
        LAYOUT.world_size, 0, SECONDS, [Failure(at_s, "node", "node", where) for at_s, where in ((1.0, 0.0), (500.0, 0.4))]
    )
    cluster.advance(510.0)
    fits = cluster.settle(LAYOUT)
    assert fits == Layout(pp=2, dp=3), "six nodes of eight"
    with in_place_of_ray(cluster):
        recovery, group = replacement(cluster, fits, 0, shrink=True, whole=LAYOUT)
        run = begun((recovery, group, cluster))
        step(run, 1)
        assert group.layout.dp == 3
        cluster.advance(1000.0 + 5.0)  # the first node is repaired
        step(run, 2)
        step(run, 3)
        assert group.layout.dp == 3
        cluster.advance(1500.0 + 5.0)
        for number in range(4, 7):
            step(run, number)
        assert group.layout.dp == 4


def step(played: Played, number: int, generate_s: float = GENERATE_S) -> dict[str, float]:
    """A step as the loop does it; its metrics."""
    recovery, group, cluster = played
    run = run_of(number)
    recovery.again(run, lambda: group.work(0.0))
    cluster.advance(cluster.now + generate_s)
    for attempt in recovery.attempts(run):
        with attempt:
            group.work(TRAIN_S)
    return run.metrics


def begun(played: Played) -> Played:
    """The run with one step behind it, whose state is in memory."""
    step(played, 0)
    return played


def test_buddies_are_in_a_ring_and_a_single_node_has_none() -> None:
    assert _buddies(["a", "b", "c"]) == {"a": "b", "b": "c", "c": "a"}
    assert _buddies(["a"]) == {"a": None}


@pytest.mark.parametrize("effect", ["node", "process"])
def test_a_loss_in_an_update_costs_its_notice_the_replacement_and_the_update(
    played: Callable[..., Played], effect: str
) -> None:
    whole = step(begun(calm := played()), 1), calm[2].now
    recovery, group, cluster = begun(played(Failure(130.0, effect, effect, 0.3)))
    metrics = step((recovery, group, cluster), 1)
    assert whole[0]["recovery/replaced_ranks"] == 0
    assert metrics["recovery/replaced_ranks"] == 1
    of_recovery = sum(SECONDS[name] for name in ("leave", "start process", "become", "connect", "load weights", "put back"))
    assert metrics["recovery/seconds"] == pytest.approx(of_recovery, abs=4)
    again_s = cluster.now - whole[1] - metrics["recovery/seconds"] - SECONDS[f"notice {effect}"]
    assert 0 < again_s <= TRAIN_S + SECONDS["copy"], "a part of the update was computed twice"
    assert group.layout == LAYOUT


def test_a_node_lost_while_engines_generate_is_replaced(played: Callable[..., Played]) -> None:
    """Its copy of the checkpoint was not finished by then: that is done when the next attempt begins."""
    run = begun(played(Failure(100.0, "node", "node", 0.3)))
    assert step(run, 1)["recovery/replaced_ranks"] == 1
    assert step(run, 2)["recovery/seconds"] == 0


def test_a_node_lost_while_its_files_are_sent_is_replaced_if_its_buddy_has_them(played: Callable[..., Played]) -> None:
    """The copy ends at 77 s, and what is sent of it arrives at 82 s; the checkpoint before is of another step."""
    run = begun(played(Failure(79.0, "node", "node", 0.3)))
    run[2].buddies_have_all = True
    assert step(run, 1)["recovery/replaced_ranks"] == 1
    with pytest.raises(WorkerError):
        step(begun(played(Failure(79.0, "node", "node", 0.3))), 1)


def test_a_process_lost_while_its_files_are_sent_is_replaced(played: Callable[..., Played]) -> None:
    run = begun(played(Failure(79.0, "bug", "process", 0.3)))
    assert step(run, 1)["recovery/replaced_ranks"] == 1


def test_a_node_and_its_buddy_are_in_nobodys_memory(played: Callable[..., Played]) -> None:
    run = begun(played(Failure(130.0, "pair", "pair", 0.3), spares=2))
    with pytest.raises(RankLostError):
        step(run, 1)


def test_without_a_spare_a_replica_is_given_up_and_comes_back(played: Callable[..., Played]) -> None:
    recovery, group, cluster = begun(played(Failure(130.0, "node", "node", 0.3), spares=0))
    step((recovery, group, cluster), 1)
    assert group.layout == Layout(pp=2, dp=3)
    cluster.advance(cluster.now + SECONDS["repair"])
    for number in range(2, 5):
        step((recovery, group, cluster), number)
    assert group.layout == LAYOUT


def test_replicas_come_back_one_by_one_while_other_nodes_are_repaired(played: Callable[..., Played]) -> None:
    """Two replicas lack a node each: what is left of both makes one, at once."""
    recovery, group, cluster = begun(played(Failure(130.0, "node", "node", 0.3), Failure(300.0, "node", "node", 0.9), spares=0))
    fewest, number = LAYOUT.dp, 0
    while (len(cluster.repairs) < 2 or group.layout.dp < 3) and number < 8:
        step((recovery, group, cluster), number := number + 1)
        fewest = min(fewest, group.layout.dp)
    assert fewest == 2
    assert group.layout == Layout(pp=2, dp=3)
    assert len(cluster.repairs) == 2, "no node is back"
    cluster.advance(cluster.now + SECONDS["repair"])
    for later in range(number + 1, number + 4):
        step((recovery, group, cluster), later)
    assert group.layout == LAYOUT
    assert len({actor.node for actor in group.actors}) == LAYOUT.world_size


@pytest.mark.parametrize("effect", ["node", "process"])
@pytest.mark.parametrize("where", [0.05, 0.5, 0.95])
def test_no_second_of_a_replicas_return_is_one_in_which_a_loss_ends_the_run(
    played: Callable[..., Played], effect: str, where: float
) -> None:
    for second in range(1200, 1320, 3):
        run = begun(played(Failure(130.0, "node", "node", 0.3), Failure(float(second), "bug", effect, where), spares=0))
        _, group, cluster = run
        cluster.buddies_have_all = True  # what nobody has in memory is another matter
        step(run, 1)
        cluster.advance(1190.0)
        number = 1
        while cluster.now < 1400.0:
            step(run, number := number + 1, generate_s=0.0)
        assert cluster.counts == {"node": 1, "bug": 1}
        cluster.advance(cluster.now + SECONDS["repair"])
        for later in range(number + 1, number + 5):
            step(run, later)
        assert group.layout == LAYOUT


def test_a_rank_lost_before_a_replica_comes_back_does_not_end_the_run(played: Callable[..., Played]) -> None:
    """Replicas are taken back at a step's border; what was lost while engines generated is replaced first."""
    recovery, group, cluster = begun(
        played(Failure(130.0, "node", "node", 0.3), Failure(1260.0, "bug", "process", 0.9), spares=0)
    )
    step((recovery, group, cluster), 1)
    cluster.advance(1200.0)  # the node is back, and a process waits there for the next step
    recovery._grow(run_of(2))
    recovery._memory.finish()
    recovery._memory.kept.moment = (2, 0)
    assert group.layout.dp == 3
    metrics = step((recovery, group, cluster), 2, generate_s=100.0)
    assert cluster.counts == {"node": 1, "bug": 1}
    assert metrics["recovery/replaced_ranks"] == 2
    step((recovery, group, cluster), 3)
    assert group.layout == LAYOUT


def test_a_rank_lost_while_a_replica_comes_back_is_replaced(played: Callable[..., Played]) -> None:
    recovery, group, cluster = begun(
        played(Failure(130.0, "node", "node", 0.3), Failure(1304.0, "bug", "process", 0.9), spares=0)
    )
    step((recovery, group, cluster), 1)
    cluster.advance(1200.0)
    recovery._grow(run_of(2))
    cluster.advance(1300.0)
    recovery._memory.finish()
    recovery._memory.kept.moment = (2, 0)
    metrics = step((recovery, group, cluster), 2, generate_s=0.0)
    assert cluster.counts == {"node": 1, "bug": 1}
    assert metrics["recovery/replaced_ranks"] == 2
    assert group.layout == LAYOUT
