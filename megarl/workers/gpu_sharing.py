"""The turns on a device that trainer and engines share, all or some of these: one state machine for offload, sleep, wake and
updates.

                    update                       generate
    TRAINING ───────────────────▶ UPDATING ───────────────────▶ GENERATING
     ▲  ▲ ▲    shed, then wake     │    ▲    the weights leave    │    │
     │  │ └────────────────────────┘    └─────────────────────────┘    │
     │  │       sleep, then all back       the weights come back       │
     │  └──────────────────────────────────────────────────────────────┘
     │ sleep                          sleep, then all back
    SHARED: everything is there, as when a run starts

There is no way from TRAINING to GENERATING: engines that were woken are given weights first, which each of them sees to by
itself, too (`weights/weight_state.py`). Memory is always given up before other memory is taken.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from megarl.config import Config
from megarl.errors import EngineError
from megarl.option_list import functions
from megarl.planning.turns import takes_turns
from megarl.rollout.scheduling.engine_state import EngineHandle, PendingResult, failures
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.runs.training_side import POLICY
from megarl.workers.roles import Roles

Kept = Literal["all", "policy", "none"]
"""Parts of the trainer on the device: everything, the policy's weights alone, or nothing."""


class Owner(Enum):
    """The user of the device."""

    SHARED = "trainer and engines"
    TRAINING = "the trainer"
    UPDATING = "the engines and the policy's weights"
    GENERATING = "the engines"


class Device(Protocol):
    """Things that are moved from and to the device."""

    def sleep(self) -> None:
        """Have all engines give up their memory, and their weights with it."""

    def wake(self) -> None:
        """Have all engines that sleep take memory again; they have no weights then."""

    def keep(self, what: Kept) -> None:
        """Bring the trainer to have exactly `what` on the device."""


class GpuSharing:
    """The state machine. A move that fails in the middle leaves it without a state: every further one is refused."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.now: Owner | None = Owner.SHARED

    def train(self) -> None:
        """Before anything that the trainer computes, saves or exports."""
        if self.now is not Owner.TRAINING:
            self._move(Owner.TRAINING, (Owner.SHARED, Owner.UPDATING, Owner.GENERATING))

    def update(self) -> None:
        """Before engines are given weights, all of them or one that came back while the others generate."""
        if self.now is not Owner.UPDATING:
            self._move(Owner.UPDATING, (Owner.SHARED, Owner.TRAINING, Owner.GENERATING))

    def generate(self) -> None:
        """After engines were given weights."""
        self._move(Owner.GENERATING, (Owner.UPDATING,))

    def _move(self, to: Owner, ways: tuple[Owner, ...]) -> None:
        before, self.now = self.now, None
        if before is None:
            raise EngineError(
                "moving the trainer or the engines off the GPU failed earlier, so the state of the GPU is unknown and the run "
                "cannot continue"
            )
        if before not in ways:
            self.now = before
            raise EngineError(
                f"the GPU cannot go from {before.value} directly to {to.value}: the engines must take a weight update first"
            )
        if to is Owner.TRAINING:
            self._device.sleep()
            if before is not Owner.SHARED:
                self._device.keep("all")
        elif to is Owner.UPDATING:
            self._device.keep("policy")
            if before is Owner.TRAINING:
                self._device.wake()
        else:
            self._device.keep("none")
        self.now = to


class ColocatedDevice:
    """`Device` of a run: all engines through their scheduler, and all of the trainer's ranks."""

    def __init__(self, config: Config, scheduler: Scheduler, roles: Roles) -> None:
        self._deadlines, self._scheduler, self._roles = config.rollout.deadlines, scheduler, roles

    def sleep(self) -> None:
        """Put engines to sleep: requests under way are begun anew after the next update; engines that fail are restarted
        as ever."""
        scheduler = self._scheduler
        scheduler.stop_all()
        scheduler.empty()
        up = [engine.number for engine in scheduler.engines if engine.restarting is None]
        failed = self._failures(up, lambda _, engine: engine.sleep(deadline_s=self._deadlines.update_s))
        for engine, error in failed.items():
            raise EngineError(f"engine {engine} did not give up its memory: {error}")

    def wake(self) -> None:
        """An engine that was restarted meanwhile does not sleep, which is as good."""
        waiting = self._scheduler.without_weights
        self._failures(waiting, lambda _, engine: engine.wake(deadline_s=self._deadlines.update_s))

    def keep(self, what: Kept) -> None:
        """All ranks of all groups move what they have; where there is no CUDA nothing is moved."""
        self._roles.keep_on_device(what)

    def _failures(self, engines: list[int], call: Callable[[int, EngineHandle], Awaitable[None]]) -> dict[int, Exception]:
        """The engines that are well and yet did not do it, and why; the scheduler sees to those that are not well."""
        failed = failures(self._scheduler.on_each(engines, call, self._deadlines.update_s))
        unwell = self._scheduler.failing(failed)
        for engine, error in unwell.items():
            self._scheduler.fail(engine, error)
        return {engine: error for engine, error in failed.items() if engine not in unwell}


@dataclass(frozen=True)
class GpuTurns:
    """The turns that engines, by number, take with the trainer by way of `sharing`.

    `before_use` is called before the trainer works; `before_wait`, with the version of the weights, before the driver waits for
    answers (None: for the batch that is due). `take_figures` gives metrics since its last call.
    """

    sharing: GpuSharing
    engines: Sequence[int]
    before_use: Callable[[], None]
    before_wait: Callable[[int, Sequence[PendingResult] | None], None] = lambda version, answers: None
    take_figures: Callable[[], dict[str, float]] = dict

    def moves(self, engines: Sequence[int]) -> bool:
        """Return whether an update of these engines moves what is on GPUs: not if none of them shares any, and the
        trainer has its."""
        trainer_is_there = self.sharing.now in (Owner.SHARED, Owner.TRAINING)
        return not trainer_is_there or any(engine in self.engines for engine in engines)


def turns_of(
    config: Config, scheduler: Scheduler, roles: Roles, update: Callable[[Sequence[int], int], None]
) -> GpuTurns | None:
    """The turns of trainer and engines on GPUs, of a run that has such; `update` gives engines the weights of a version."""
    for take_turns in functions("turns", "take_turns"):
        turns: GpuTurns | None = take_turns(config, scheduler, roles, update)
        if turns is not None:
            return turns
    if not takes_turns(config, roles.groups[POLICY].platform):
        return None
    sharing = GpuSharing(ColocatedDevice(config, scheduler, roles))
    return GpuTurns(sharing, range(len(scheduler.engines)), sharing.train)
