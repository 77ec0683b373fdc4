"""A Ray that does not come up in its time is one sentence, and worth another attempt."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import node

from megarl.config.layout import Layout
from megarl.errors import WorkerError
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
