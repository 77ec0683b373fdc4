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
from megarl.errors import DeadlineError, WorkerError
from megarl.workers import post_mortem
from megarl.workers.fate import keep_last_words
from megarl.workers.group import WorkerGroup


@ray.remote(concurrency_groups={"control": 1})
class Sleeper:
    """Answers what `WorkerGroup` asks of a rank, without a model."""

    def __init__(self, log_folder: str, rank: int) -> None:
        from megarl.workers.rank import Rank  # now, as it takes longer than a dump may

        self.name, self.rank, self._dump = "policy", rank, Rank.dump_stacks
        keep_last_words(f"{log_folder}/policy-{rank}.log")
        os.write(1, f"rank {rank} was here\n".encode())

    def whereabouts(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), os.getpid()

    def sleep_in_a_named_place(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @ray.method(concurrency_group="control")
    def dump_stacks(self, folder: str) -> str:
        return self._dump(self, folder)  # type: ignore[arg-type]


@pytest.fixture
def group(local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    monkeypatch.setattr(post_mortem, "STACKS_DEADLINE_S", 5.0)
    actors: list[Any] = [Sleeper.options(num_cpus=0).remote(str(tmp_path), rank) for rank in range(3)]
    group = WorkerGroup("policy", Layout(dp=3), actors, str(tmp_path))
    group.whereabouts = group.call("whereabouts", (), phase="start", deadline_s=60)
    yield group
    for _, pid in group.whereabouts:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)
    group.kill()


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    seconds = [(0.3,), (0.0,), (0.1,)]
    assert group.call("sleep_in_a_named_place", seconds, phase="sleep", deadline_s=30) == [0, 1, 2]


def test_a_rank_that_is_stopped_is_named_though_others_are_late_too(group: WorkerGroup, tmp_path: Path) -> None:
    pid = group.whereabouts[1][1]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError) as caught:
        group.call("sleep_in_a_named_place", (20.0,), phase="sleep", deadline_s=1)
    assert caught.value.who == "rank 1 of policy"
    text = str(caught.value)
    assert "phase 'sleep' was not done after 1 s: ranks of policy [0, 1, 2] had not answered" in text
    assert f"rank 1 of policy (process {pid} on {group.whereabouts[1][0]}) is stopped (SIGSTOP)" in text
    assert "rank 0 of policy (" not in text
    reports = [(tmp_path / "stacks" / f"policy-{rank}.txt").read_text() for rank in range(3)]
    for rank, report in enumerate(reports):
        state = "is stopped (SIGSTOP)" if rank == 1 else "answers"
        assert report.startswith(f"rank {rank} of policy (process {group.whereabouts[rank][1]} on ")
        assert f"in phase 'sleep': {state}" in report
        assert f"rank {rank} was here" in report
        assert ("sleep_in_a_named_place" in report) == (rank != 1)


def test_a_rank_that_is_gone_is_named(group: WorkerGroup, tmp_path: Path) -> None:
    started = group.submit("sleep_in_a_named_place", (20.0,))
    os.kill(group.whereabouts[2][1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"rank 2 of policy .* is gone") as caught:
        group.wait(started, phase="sleep", deadline_s=30)
    assert caught.value.who == "rank 2 of policy"
    assert "sleep_in_a_named_place" in (tmp_path / "stacks" / "policy-0.txt").read_text()


def test_a_rank_that_was_out_of_memory_is_named(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Any, timeout: float) -> None:
        raise ray.exceptions.OutOfMemoryError("the node ran low on memory")  # what Ray's memory monitor leaves of an actor

    monkeypatch.setattr(post_mortem.ray, "get", get)
    silent, clause = group.examine("policy update")
    assert silent == ["rank 0 of policy", "rank 1 of policy", "rank 2 of policy"]
    assert f"rank 1 of policy (process {group.whereabouts[1][1]} on " in clause
    assert "was ended by Ray, as its node was short of memory" in clause
