"""The turns of lent engines with the trainer, whose GPUs they stand on (`rollout.schedule.lent_engines`).

The GPUs are lent while the driver waits for samples, and given back before anything that the trainer computes, saves or
exports. What has a state is in `gpu_sharing.py`; here are the engines, the decision and the clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megarl.config import Config
from megarl.options.lending.section import lent_engines_of
from megarl.rollout.scheduling.engine_state import FAILURES, PendingResult
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.workers.gpu_sharing import EnginesInTurns, GpuSharing, GpuTurns
from megarl.workers.roles import Roles


class LentEngines(EnginesInTurns):
    """Engines that the trainer's GPUs are lent to, among others that have their own."""

    @property
    def sampled_tokens(self) -> int:
        """Count the tokens that they have answered with so far."""
        return sum(self.scheduler.engines[number].sampled_tokens for number in self.numbers)

    def work_for(self, version: int, answers: Sequence[PendingResult] | None = None) -> int:
        """Number of groups and asked requests that they could start now under weights of `version`.

        0 if the batch that is due, or `answers`, are there.
        """

        async def counted() -> int:
            scheduler = self.scheduler
            is_done = scheduler.manager.ready() if answers is None else all(answer.done() for answer in answers)
            return 0 if is_done else await scheduler.work_for(version)

        return self.scheduler.thread.run(counted())


TRIALS = 2
"""Times that GPUs are lent without knowing whether it pays: what is done for the first time takes longer."""


@dataclass
class LendingRule:
    """GPUs are lent if the trainer was last idle for longer than lending them takes.

    Lending takes the seconds of waking engines, sending them weights, and of giving the GPUs back: the least that was
    measured, of at least `TRIALS` times.
    """

    costs_s: list[float] = field(default_factory=list)
    idle_s: float = 0.0
    """How long the trainer was idle the last time, whether its GPUs were lent or not."""

    def pays(self) -> bool:
        """Return whether to lend."""
        return len(self.costs_s) < TRIALS or self.idle_s > min(self.costs_s)


class Lending:
    """The lent engines of a run, its `sharing` of their GPUs, and how much they were used."""

    def __init__(
        self,
        engines: LentEngines,
        sharing: GpuSharing,
        update: Callable[[Sequence[int], int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`update` gives engines the policy's weights under a version, by way of the `sharing`."""
        self.engines, self.rule = engines, LendingRule()
        self._sharing, self._update, self._clock = sharing, update, clock
        self._idle_since: float | None = None
        self._lent_since: float | None = None
        self._cost_s = 0.0
        self._counted_tokens = 0
        self._sums = {"idle": 0.0, "lent": 0.0, "switching": 0.0}

    def wait(self, version: int, answers: Sequence[PendingResult] | None = None) -> None:
        """The trainer waits from now on, for `answers` or the batch that is due: lend its GPUs if that pays.

        Nothing is lent while there is nothing that further engines could start under weights of `version`.
        """
        begun = self._clock()
        self._idle_since = begun if self._idle_since is None else self._idle_since
        if self._lent_since is not None or not self.rule.pays() or not self.engines.work_for(version, answers):
            return
        self._update(self.engines.numbers, version)
        self._lent_since = self._clock()
        self._cost_s = self._lent_since - begun

    def take_back(self) -> None:
        """Before the trainer works: its GPUs are its own again."""
        begun = self._clock()
        self._sharing.train()
        if self._idle_since is not None:
            self.rule.idle_s = begun - self._idle_since
            self._sums["idle"] += self.rule.idle_s
        if self._lent_since is not None:
            self._cost_s += self._clock() - begun
            self._sums["lent"] += begun - self._lent_since
            self._sums["switching"] += self._cost_s
            self.rule.costs_s.append(self._cost_s)
        self._idle_since = self._lent_since = None

    def take_figures(self) -> dict[str, float]:
        """Metrics since the last call, of what has been given back."""
        sums, self._sums = self._sums, dict.fromkeys(self._sums, 0.0)
        before, self._counted_tokens = self._counted_tokens, self.engines.sampled_tokens
        return {
            "rollout/lent_tokens": self._counted_tokens - before,
            "rollout/lent_s": sums["lent"],
            "rollout/lending_s": sums["switching"],
            "rollout/lent_share": sums["lent"] / sums["idle"] if sums["idle"] else 0.0,
        }


def take_turns(
    config: Config, scheduler: Scheduler, roles: Roles, update: Callable[[Sequence[int], int], None]
) -> GpuTurns | None:
    """The turns of a run that lends its trainer's GPUs; None of any other."""
    rollout = config.rollout
    numbers = range(rollout.engines, rollout.engines + lent_engines_of(rollout.schedule))
    if not numbers:
        return None
    restart_s = (FAILURES + 1) * scheduler.restarts.deadline_s
    engines = LentEngines(scheduler, numbers, restart_s=restart_s, call_s=rollout.deadlines.update_s)
    sharing = GpuSharing(engines.rest, engines.wake, engines.wake_caches, roles.keep_on_device)
    lending = Lending(engines, sharing, update)
    return GpuTurns(sharing, engines.numbers, lending.take_back, lending.wait, lending.take_figures)
