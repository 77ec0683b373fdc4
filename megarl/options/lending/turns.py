"""The turns of lent engines with the trainer, whose GPUs they stand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.config import Config
from megarl.options.lending.engines import LentEngines
from megarl.options.lending.rule import Lending
from megarl.options.lending.section import lent_engines_of
from megarl.rollout.scheduling.scheduler import FAILURES, Scheduler
from megarl.workers.gpu_sharing import GpuSharing, GpuTurns, Kept
from megarl.workers.roles import Roles


def take_turns(
    config: Config, scheduler: Scheduler, roles: Roles, update: Callable[[Sequence[int], int], None]
) -> GpuTurns | None:
    """The turns of a run that lends its trainer's GPUs; None of any other."""
    rollout = config.rollout
    numbers = range(rollout.engines, rollout.engines + lent_engines_of(rollout.schedule))
    if not numbers:
        return None
    restart_s = (FAILURES + 1) * scheduler.restart_deadline_s
    engines = LentEngines(scheduler, numbers, restart_s=restart_s, call_s=rollout.deadlines.update_s)
    sharing = GpuSharing(LentDevice(engines, roles))
    lending = Lending(engines, sharing, update)
    return GpuTurns(sharing, engines.numbers, lending.take_back, lending.wait, lending.take_figures)


class LentDevice:
    """`Device` of a run that lends the trainer's GPUs: the engines on them, and all of the trainer's ranks."""

    def __init__(self, engines: LentEngines, roles: Roles) -> None:
        self._engines, self._roles = engines, roles

    def sleep(self) -> None:
        """Put engines to sleep: requests under way go on on other engines, or later."""
        self._engines.rest()

    def wake(self) -> None:
        """All of them that are well; the others are started anew."""
        self._engines.wake()

    def keep(self, what: Kept) -> None:
        """Keep on the device as `ColocatedDevice` does."""
        self._roles.keep_on_device(what)
