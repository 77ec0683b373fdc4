"""Gains of lending the trainer's GPUs: seconds in which they would wait, against those that lending takes."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.planning.calibration import Calibration
from megarl.planning.gpu_memory import MemoryPlan
from megarl.planning.gpus import GpuSpec
from megarl.planning.roles import RunShape
from megarl.planning.times import TimePlan, update_seconds


@dataclass(frozen=True)
class LendingPlan:
    """Seconds of a step with `engines` lent ones, and `without_s` them. `idle_s` of the latter the trainer waits.

    `cost_s`: of waking engines, sending them weights and giving the GPUs back.
    """

    engines: int
    idle_s: float
    cost_s: float
    step_s: float
    without_s: float

    @property
    def pays(self) -> bool:
        """Return whether the trainer waits for longer than lending takes; else its GPUs are not lent."""
        return self.idle_s > self.cost_s

    @property
    def gain(self) -> float:
        """The share by which a step is shorter."""
        return 1 - self.step_s / self.without_s


def plan_lending(
    run: RunShape, gpu: GpuSpec, memory: MemoryPlan, times: TimePlan, calibration: Calibration
) -> LendingPlan | None:
    """The plan of a run that lends GPUs; None of any other. `times` are those of the run without it.

    Lent engines are counted as fast as the others while they work. With G seconds of generation by E engines alone, R of
    everything else, a cost of C and L lent engines, a step of T seconds has T / G of its responses from the others, and
    (T - R - C) / G * L / E from the lent ones.
    """
    if run.lent is None or run.engines is None:
        return None
    sent = update_seconds(run.lent, gpu, memory, colocated=True, in_turns=gpu.name != "cpu")
    cost = sum(sent.values()) * calibration.scale("sync")
    generation, rest = times.seconds("generate"), times.trainer_seconds
    more = run.lent.target.engines / run.engines.target.engines
    without = max(generation, rest)
    idle = without - rest
    step = (generation + more * (rest + cost)) / (1 + more) if idle > cost else without
    return LendingPlan(run.lent.target.engines, idle, cost, step, without)
