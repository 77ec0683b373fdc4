"""A Ray that does not come up in its time is one sentence, and worth another attempt."""

from __future__ import annotations

import ctypes
import inspect
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import node

from megarl.config.layout import Layout
from megarl.errors import ClusterError, WorkerError
from megarl.supervise.restarts import ENVIRONMENT
from megarl.workers.cluster import Cluster, GroupRequest

SENTENCE = "The current node timed out during startup."


def cluster(folder: Path) -> Cluster:
    requests = [GroupRequest(name="policy", layout=Layout(), threads=1)]
    options = {"engines": 0, "engine_tp": 1, "colocated": True, "ray_address": None, "start_deadline_s": 60}
    return Cluster(requests, log_folder=str(folder), **options)


def test_a_machine_that_is_too_busy_for_ray_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert SENTENCE in " ".join(inspect.getsource(node.Node).replace('"', "").split())  # of the installed Ray

    def init(**_: Any) -> None:
        raise Exception(f"{SENTENCE} This could happen because")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(WorkerError, match=r"^Ray did not come up on this machine in its time \(The current node timed out"):
        cluster(tmp_path).__enter__()
    assert "WorkerError" in ENVIRONMENT


def test_what_is_no_lack_of_time_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**_: Any) -> None:
        raise ValueError("no such argument")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="no such argument"):
        cluster(tmp_path).__enter__()


@pytest.fixture
def ray_of_its_own(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands for Ray: it comes up when `may_come_up` is set, and says what became of it."""
    seen: dict[str, Any] = {"may_come_up": threading.Event(), "events": []}

    def init(**_: Any) -> None:
        seen["may_come_up"].wait(10)
        seen["events"].append("up")

    def shutdown() -> None:
        seen["events"].append("down")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: seen["events"][-1:] == ["up"])
    monkeypatch.setattr(ray, "shutdown", shutdown)
    monkeypatch.setattr(Cluster, "_place", lambda self: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return seen


def test_a_ray_that_was_begun_before_is_waited_for_and_ended(ray_of_its_own: dict[str, Any], tmp_path: Path) -> None:
    one = cluster(tmp_path)
    one.begin()
    assert ray_of_its_own["events"] == []
    ray_of_its_own["may_come_up"].set()
    with one:
        assert ray_of_its_own["events"] == ["up"]
    assert ray_of_its_own["events"] == ["up", "down"]
    one.shutdown()
    assert ray_of_its_own["events"] == ["up", "down"]


def test_a_run_hears_of_sigterm_itself_behind_a_begun_ray(
    ray_of_its_own: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The handler that Ray's library has for crashes ends the process 3 s later, also of a run that saves."""
    init, heard = ray.init, list[int]()

    def init_with_a_handler(**options: Any) -> None:
        init(**options)
        ctypes.CDLL(None).signal(signal.SIGTERM, signal.SIG_IGN)

    monkeypatch.setattr(ray, "init", init_with_a_handler)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        one = cluster(tmp_path)
        one.begin()
        ray_of_its_own["may_come_up"].set()
        with one:
            signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_ray_that_was_begun_for_a_run_that_never_starts_is_ended(ray_of_its_own: dict[str, Any], tmp_path: Path) -> None:
    one = cluster(tmp_path)
    one.begin()
    ray_of_its_own["may_come_up"].set()
    one.shutdown()
    assert ray_of_its_own["events"] == ["up", "down"]


def test_a_ray_that_is_there_or_somewhere_else_is_not_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**_: Any) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    one = cluster(tmp_path)
    one.begin()
    assert one._starting is None
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    other = cluster(tmp_path)
    other.begin()
    assert other._starting is None


@pytest.mark.parametrize(
    ("address", "is_there"),
    [
        ("10.0.0.1:6379", True), ("127.0.0.1:6379", True), ("localhost:6379", True), ("auto", True), ("ray://10.0.0.2:1", True),
        ("10.0.0.1:6380", False), ("10.0.0.2:6379", False), ("no-such-host.invalid:6379", False),
    ],
)  # fmt: skip
def test_a_run_does_not_take_another_ray_than_it_was_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, is_there: bool
) -> None:
    """The process has joined one already, as a notebook may."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"))
    monkeypatch.setenv("RAY_ADDRESS", address)
    one = cluster(tmp_path)
    if is_there:
        one._join_ray()
        return
    with pytest.raises(ClusterError, match=r"^this process has joined the Ray at 10\.0\.0\.1:6379, and resources\.ray_address"):
        one._join_ray()


def test_a_begun_ray_that_does_not_come_up_is_told_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**_: Any) -> None:
        raise Exception(f"{SENTENCE} This could happen because")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    one = cluster(tmp_path)
    one.begin()
    with pytest.raises(WorkerError, match=r"^Ray did not come up on this machine in its time"):
        one.__enter__()
    one.shutdown()
