"""When a call to ranks does not come back, the error names those that are to blame, and their stacks are there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from megarl.config.layout import Layout
from megarl.errors import DeadlineError, ModelError, WorkerError
from megarl.system.process_exit import log_to_file
from megarl.workers import failure_report
from megarl.workers.group import WorkerGroup
from megarl.workers.node_ranks import NodeHandle, NodeRanksActor
from megarl.workers.rank_actor import write_stacks
from megarl.workers.rank_watch import RankWatch


class Sleeper:
    """Answers what `WorkerGroup` asks of a rank, without a model."""

    def __init__(self, log_folder: str, rank: int) -> None:
        self.rank, self.remembered = rank, list[int]()
        log_to_file(f"{log_folder}/policy-{rank}.log")
        os.write(1, f"rank {rank} was here\n".encode())

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def host_and_pid(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), os.getpid()

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, int]:
        return 0, 0

    def remember(self, number: int) -> list[int]:
        """All numbers since the last 0."""
        self.remembered = [*(self.remembered if number else []), number]
        return self.remembered

    def fail(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def sleep_in_a_named_place(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def keep(self, error: Exception | None, value: bytes) -> tuple[int, bytes]:
        """Two values, the second of which stays where it is."""
        self.fail(error)
        return self.rank, value

    @ray.method(concurrency_group="control")
    def dump_stacks(self, folder: str) -> str:
        return write_stacks(folder, "policy", self.rank)


SLEEP: Any = Sleeper.sleep_in_a_named_place
"""Called as the methods of `RankCalls` are."""


def start(log_folder: Path, *, by_node: bool) -> tuple[list[Any], list[NodeHandle]]:
    """Three ranks, and what calls them: for `by_node` one process for two of them and one for the third."""
    sleeper: Any = ray.remote(concurrency_groups={"control": 1})(Sleeper)
    actors: list[Any] = [sleeper.options(num_cpus=0).remote(str(log_folder), rank) for rank in range(3)]
    of_nodes = ([0, 2], [1]) if by_node else ()
    nodes = [NodeHandle(NodeRanksActor.remote([actors[rank] for rank in ranks], silent_s=2), ranks) for ranks in of_nodes]
    return actors, nodes


def group_of(actors: list[Any], nodes: list[NodeHandle], log_folder: Path) -> WorkerGroup:
    group = WorkerGroup("policy", Layout(dp=3), actors, str(log_folder), nodes=nodes)
    group.host_and_pid = ray.get([actor.host_and_pid.remote() for actor in actors])
    return group


@pytest.fixture(scope="module")
def lasting() -> Iterator[dict[str, WorkerGroup]]:
    """The groups of tests that do their ranks no harm, of the same processes; the first of these tests makes them."""
    groups: dict[str, WorkerGroup] = {}
    yield groups
    for group in groups.values():
        group.kill()


@pytest.fixture(params=["by rank", "by node"])
def called(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who calls the ranks: the driver, or a process on each of two nodes."""
    monkeypatch.setattr(failure_report, "STACKS_DEADLINE_S", 5.0)
    return str(request.param)


@pytest.fixture
def group(
    called: str, lasting: dict[str, WorkerGroup], local_ray: None, tmp_path_factory: pytest.TempPathFactory
) -> WorkerGroup:
    """Three ranks that other tests call too."""
    if not lasting:
        folder = tmp_path_factory.mktemp("ranks")
        actors, nodes = start(folder, by_node=True)
        lasting |= {"by rank": group_of(actors, [], folder), "by node": group_of(actors, nodes, folder)}
    return lasting[called]


@pytest.fixture
def own_group(called: str, local_ray: None, tmp_path: Path) -> Iterator[WorkerGroup]:
    """Three ranks for a test that stops or kills them."""
    group = group_of(*start(tmp_path, by_node=called == "by node"), tmp_path)
    yield group
    for _, pid in group.host_and_pid:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)
    group.kill()


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    seconds = [(0.3,), (0.0,), (0.1,)]
    assert group.wait(group.submit(SLEEP, seconds), phase="sleep", deadline_s=30) == [0, 1, 2]
    assert group.call(SLEEP, 0.0, phase="sleep", deadline_s=30) == [0, 1, 2]


def test_calls_reach_the_ranks_in_the_order_in_which_they_were_made(group: WorkerGroup) -> None:
    remember: Any = Sleeper.remember
    submitted = [group.submit(remember, [(number,)] * 3) for number in range(30)]
    answers = [group.wait(one, phase="remember", deadline_s=60) for one in submitted]
    assert answers == [[[*range(number + 1)]] * 3 for number in range(30)]


def test_second_values_stay_where_they_are_and_can_be_handed_on(group: WorkerGroup) -> None:
    keep: Any = Sleeper.keep
    asked = {2: (None, b"two" * 100_000), 0: (None, b"zero")}
    told = group.wait_stored(group.submit_stored(keep, asked), phase="keep", deadline_s=30)
    assert {rank: first for rank, (first, _) in told.items()} == {0: 0, 2: 2}
    assert {rank: second.get() for rank, (_, second) in told.items()} == {0: b"zero", 2: b"two" * 100_000}
    again = group.wait_stored(group.submit_stored(keep, {1: (None, told[2][1].reference)}), phase="keep", deadline_s=30)
    assert again[1][1].get() == b"two" * 100_000
    assert group.call(SLEEP, 0.0, phase="sleep", deadline_s=30) == [0, 1, 2]


def test_a_rank_that_fails_before_it_keeps_anything_is_told_with_its_number(group: WorkerGroup) -> None:
    keep: Any = Sleeper.keep
    calls = {0: (None, b""), 2: (ValueError("no such thing"), b"")}
    with pytest.raises(WorkerError, match=r"rank 2 of policy failed in phase 'keep'; .*\n(.*\n)*.*ValueError: no such thing"):
        group.wait_stored(group.submit_stored(keep, calls), phase="keep", deadline_s=60)
    with pytest.raises(ModelError, match=r"^the folder is empty$"):
        group.wait_stored(group.submit_stored(keep, {1: (ModelError("the folder is empty"), b"")}), phase="keep", deadline_s=60)


def test_what_a_rank_raises_is_told_with_its_number_and_the_users_mistakes_as_they_are(group: WorkerGroup) -> None:
    fail: Any = Sleeper.fail
    with pytest.raises(WorkerError, match=r"rank 1 of policy failed in phase 'fail'; .*\n(.*\n)*.*ValueError: no such thing"):
        group.wait(group.submit(fail, [(None,), (ValueError("no such thing"),), (None,)]), phase="fail", deadline_s=60)
    with pytest.raises(ModelError, match=r"^the folder is empty$"):
        group.wait(group.submit(fail, [(None,), (None,), (ModelError("the folder is empty"),)]), phase="fail", deadline_s=60)


def test_a_rank_that_is_stopped_is_named_though_others_are_late_too(own_group: WorkerGroup, tmp_path: Path) -> None:
    pid = own_group.host_and_pid[1][1]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError) as caught:
        own_group.call(SLEEP, 20.0, phase="sleep", deadline_s=1)
    assert caught.value.who == "rank 1 of policy"
    text = str(caught.value)
    assert "phase 'sleep' was not done after 1 s: ranks of policy [0, 1, 2] had not answered" in text
    assert f"rank 1 of policy (process {pid} on {own_group.host_and_pid[1][0]}) is stopped (SIGSTOP)" in text
    assert "rank 0 of policy (" not in text
    reports = [(tmp_path / "stacks" / f"policy-{rank}.txt").read_text() for rank in range(3)]
    for rank, report in enumerate(reports):
        state = "is stopped (SIGSTOP)" if rank == 1 else "answers"
        assert report.startswith(f"rank {rank} of policy (process {own_group.host_and_pid[rank][1]} on ")
        assert f"in phase 'sleep': {state}" in report
        assert f"rank {rank} was here" in report
        assert ("sleep_in_a_named_place" in report) == (rank != 1)


def test_a_rank_that_is_gone_is_named(own_group: WorkerGroup, tmp_path: Path) -> None:
    started = own_group.submit(SLEEP, [(20.0,)] * 3)
    os.kill(own_group.host_and_pid[2][1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"rank 2 of policy .* is gone") as caught:
        own_group.wait(started, phase="sleep", deadline_s=30)
    assert caught.value.who == "rank 2 of policy"
    assert "sleep_in_a_named_place" in (tmp_path / "stacks" / "policy-0.txt").read_text()


def test_who_watches_sees_ranks_that_are_silent_or_gone(own_group: WorkerGroup) -> None:
    now = [0.0]
    if own_group.nodes:
        of_nodes = [node.ranks for node in own_group.nodes]
        states = RankWatch([node.actor for node in own_group.nodes], clock=lambda: now[0], of_nodes=of_nodes).states
    else:
        states = RankWatch(own_group.actors, clock=lambda: now[0]).states

    def until(expected: list[str], step_s: float) -> None:
        ends_at = time.monotonic() + 60
        while states() != expected:
            assert time.monotonic() < ends_at, states()
            now[0] += step_s

    busy = own_group.submit(SLEEP, [(0.5,)] * 3)
    until(["up", "up", "up"], 10)  # however busy they are
    os.kill(own_group.host_and_pid[1][1], signal.SIGSTOP)
    os.kill(own_group.host_and_pid[2][1], signal.SIGKILL)
    assert states() == ["up", "up", "up"]  # answers count for a while
    until(["up", "up", "gone"], 5)
    until(["up", "silent", "gone"], 5)
    os.kill(own_group.host_and_pid[1][1], signal.SIGCONT)
    until(["up", "up", "gone"], 5)
    if own_group.nodes:
        assert ray.get(busy[1]) == [1]
        with pytest.raises(ray.exceptions.RayTaskError, match="RankFailure"):
            ray.get(busy[0])  # of the ranks 0 and 2
    else:
        assert ray.get(busy[:2]) == [0, 1]


def test_a_rank_that_was_out_of_memory_is_named(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Any, timeout: float) -> None:
        raise ray.exceptions.OutOfMemoryError("the node ran low on memory")  # what Ray's memory monitor leaves of an actor

    monkeypatch.setattr(failure_report.ray, "get", get)
    silent, clause = group.examine("policy update")
    assert silent == ["rank 0 of policy", "rank 1 of policy", "rank 2 of policy"]
    assert f"rank 1 of policy (process {group.host_and_pid[1][1]} on " in clause
    assert "was ended by Ray, as its node was short of memory" in clause
