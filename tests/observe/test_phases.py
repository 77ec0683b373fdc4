"""Phase times add up: nested phases are exclusive, and what is in no phase is `other`."""

from __future__ import annotations

import pytest

from megarl.observe import Phases


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def test_nested_phases_and_other_add_up_to_the_step() -> None:
    clock = Clock()
    phases = Phases(clock)
    with phases.step():
        clock.wait(1)
        with phases("train"):
            clock.wait(2)
            with phases("sync"):
                clock.wait(4)
                with phases("train"):
                    clock.wait(8)
            clock.wait(16)
        clock.wait(32)
    assert phases.last_step is not None
    assert phases.last_step.wall_s == 63
    assert phases.last_step.phase_s == {"train": 26, "sync": 4, "other": 33}
    metrics = phases.last_step.metrics()
    assert metrics["time/step_s"] == 63
    assert metrics["time/train_s"] == 26
    assert metrics["time_fraction/other"] == pytest.approx(33 / 63)


def test_totals_are_over_steps_and_evaluation_outside_is_apart() -> None:
    clock = Clock()
    phases = Phases(clock)
    with phases("evaluate"):
        clock.wait(50)
    for seconds in (1, 3):
        with phases.step(), phases("generate"):
            clock.wait(seconds)
        clock.wait(7)  # between steps: in no step and no phase
    assert phases.steps == 2
    assert phases.totals() == {"generate": {"seconds": 4, "share": 1.0}, "other": {"seconds": 0, "share": 0.0}}
    assert phases.outside() == {"evaluate": {"seconds": 50, "share": 1.0}}


def test_a_phase_that_raises_is_left_and_its_step_not_counted() -> None:
    clock = Clock()
    phases = Phases(clock)
    with pytest.raises(ValueError, match="boom"), phases.step(), phases("generate"):
        clock.wait(5)
        raise ValueError("boom")
    assert phases.steps == 0
    with phases.step(), phases("generate"):
        clock.wait(2)
    assert phases.totals()["generate"]["seconds"] == 2


def test_listeners_hear_the_innermost_phase() -> None:
    heard: list[str | None] = []
    phases = Phases(Clock())
    phases.listen(heard.append)
    with phases("a"), phases("b"):
        pass
    assert heard == ["a", "b", "a", None]


def test_a_step_inside_a_step_or_a_phase_is_a_programming_error() -> None:
    phases = Phases(Clock())
    with pytest.raises(RuntimeError), phases.step(), phases.step():
        pass
    with pytest.raises(RuntimeError), phases("a"), phases.step():
        pass
