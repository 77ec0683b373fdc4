"""The wall time of a run by phase: seconds per phase of each step, and what is left over (`other`, time in no phase).

Times are exclusive: a phase entered inside another stops the outer one's clock, so the phases of a step add up to it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

OTHER = "other"


@dataclass(frozen=True)
class StepTimes:
    """One step's wall time: `phase_s` maps each phase to its seconds, `other` included; they add up to `wall_s`."""

    wall_s: float
    phase_s: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """`time/step_s`, `time/<phase>_s` and `time_fraction/<phase>` (of the step, 0 to 1)."""
        seconds = {f"time/{name}_s": spent for name, spent in self.phase_s.items()}
        shares = {f"time_fraction/{name}": spent / self.wall_s for name, spent in self.phase_s.items()} if self.wall_s else {}
        return {"time/step_s": self.wall_s, **seconds, **shares}


class Phases:
    """Wall timers: `with phases.step(): ... with phases("generate"): ...`. For one thread, the driver's loop.

    Phases outside any step (set-up, evaluation) are accounted apart, so that `other` is the loop's own overhead.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stack: list[str] = []
        self._since = 0.0
        self._step_s: dict[str, float] | None = None
        self._totals_s: dict[str, float] = defaultdict(float)
        self._outside_s: dict[str, float] = defaultdict(float)
        self._listeners: list[Callable[[str | None], None]] = []
        self.last_step: StepTimes | None = None
        self.steps = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time inside to `name`."""
        self._charge()
        self._stack.append(name)
        self._tell()
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()
            self._tell()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step. A step that raises is not counted."""
        if self._step_s is not None or self._stack:
            raise RuntimeError("a step starts outside any phase and any other step")
        self._step_s = defaultdict(float)
        start = self._since = self._clock()
        try:
            yield
            wall_s = self._clock() - start
            spent = dict(self._step_s)
            spent[OTHER] = max(0.0, wall_s - sum(spent.values()))
            self.last_step = StepTimes(wall_s=wall_s, phase_s=spent)
            for name, seconds in spent.items():
                self._totals_s[name] += seconds
            self.steps += 1
        finally:
            self._step_s = None

    def listen(self, listener: Callable[[str | None], None]) -> None:
        """Call `listener` with the innermost phase (None: in no phase) at every change."""
        self._listeners.append(listener)

    def totals(self) -> dict[str, dict[str, float]]:
        """Per phase over all finished steps: `{"seconds": ..., "share": ...}`, longest first; shares add up to 1."""
        return _with_shares(self._totals_s)

    def outside(self) -> dict[str, dict[str, float]]:
        """The same for phases outside any step; shares are of the time in such phases."""
        return _with_shares(self._outside_s)

    def _charge(self) -> None:
        now = self._clock()
        if self._stack:
            account = self._outside_s if self._step_s is None else self._step_s
            account[self._stack[-1]] += now - self._since
        self._since = now

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self._stack[-1] if self._stack else None)


def _with_shares(seconds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    total = sum(seconds.values())
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: {"seconds": spent, "share": spent / total if total else 0.0} for name, spent in ranked}
