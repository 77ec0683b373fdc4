"""Gains of lending the trainer's GPUs: seconds in which they would wait, against those that lending takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.options.lending.checks import with_lent_engines
from megarl.planning.calibration import Calibration
from megarl.planning.gpu_memory import MemoryPlan
from megarl.planning.gpus import GpuSpec
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.roles import RunShape
from megarl.planning.times import TimePlan, plan_times, update_seconds


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


def lending_of(plan: CapacityPlan) -> LendingPlan | None:
    """Plan what lending the trainer's GPUs gains, or would gain with as many engines as have room there.

    None: the run cannot lend them, or they would not hold the engines.
    """
    config, run = plan.run.config, plan.run
    if config.sampling is None or run.engines is None:
        return None
    if not config.sampling.lent_engines:
        trainers = sum(layout.world_size for layout in run.groups.values())
        lending = with_lent_engines(config, trainers // run.engines.target.ranks)
        if lending is None:
            return None
        config = lending
    with_them = make_plan(config, plan.gpu, lengths=plan.lengths, calibration=plan.calibration)
    times = plan_times(with_them.run, plan.gpu, with_them.memory, plan.lengths, plan.calibration)
    fits = with_them.memory.fits
    return plan_lending(with_them.run, plan.gpu, with_them.memory, times, plan.calibration) if fits else None


def shortened(plan: CapacityPlan, times: TimePlan) -> TimePlan:
    """The times of a run that lends its GPUs, whose step is shorter than its phases say."""
    lending = plan_lending(plan.run, plan.gpu, plan.memory, times, plan.calibration)
    return times if lending is None else replace(times, step_s=lending.step_s)


def times_as_json(plan: CapacityPlan) -> dict[str, Any]:
    """Figures that stand beside the phases of a step."""
    lending = lending_of(plan)
    return {} if lending is None else {"lending": asdict(lending)}


def stated(plan: CapacityPlan) -> list[str]:
    """The line on what lending the trainer's GPUs gains, or would gain; none where nothing is to be said."""
    lending, sampling = lending_of(plan), plan.run.config.sampling
    if lending is None or sampling is None:
        return []
    if not lending.idle_s:
        return ["The trainer never waits: lent engines would be left asleep"] if sampling.lent_engines else []
    waits = f"The trainer waits {lending.idle_s:,.3g} s of a step of {lending.without_s:,.3g} s"
    takes = f"lending its GPUs takes {lending.cost_s:,.3g} s"
    shorter = f"{lending.step_s:,.3g} s, {lending.gain:.0%} less ({takes})"
    if sampling.lent_engines:
        gain = shorter if lending.pays else f"as long: they are left asleep, because {takes}"
        return [f"{waits} without rollout.schedule.lent_engines; a step with them takes {gain}"]
    if lending.pays:
        return [f"{waits}; with rollout.schedule.lent_engines={lending.engines} a step would take {shorter}"]
    return [f"{waits}; rollout.schedule.lent_engines would not shorten it: {takes}"]
