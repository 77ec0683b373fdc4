"""Seconds of a tower: by the clock on a CPU; on a GPU by events, which nobody waits for before they are asked for."""

from __future__ import annotations

import time

import pytest
import torch

from megarl.options.pictures.tower_time import TowerTime


def test_on_a_cpu_the_clock_counts_what_is_done_within_and_is_then_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.5, 7.0, 7.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    times = TowerTime()
    for _ in range(2):
        with times.measured(torch.device("cpu")):
            pass
    assert times.take() == 0.75
    assert times.take() == 0.0


def test_on_a_gpu_nobody_waits_until_the_seconds_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        """One after the other, 500 ms apart."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at_ms = 0.0

        def record(self) -> None:
            done.append("record")
            self.at_ms = 500.0 * len(done)

        def synchronize(self) -> None:
            done.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            assert "synchronize" in done
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = TowerTime()
    for _ in range(2):
        with times.measured(torch.device("cuda", 0)):
            pass
    assert done == ["record"] * 4
    assert times.take() == 1.0
    assert done == ["record"] * 4 + ["synchronize"]
    assert times.take() == 0.0
