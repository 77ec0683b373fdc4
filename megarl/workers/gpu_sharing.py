"""The turns on a device that trainer and engines share, all or some of these: one state machine for offload, sleep, wake and
updates.

                    update                       generate
    TRAINING ───────────────────▶ UPDATING ───────────────────▶ GENERATING
     ▲  ▲ ▲   shed, then wake for  │    ▲   the policy's weights  │    │
     │  │ │   weights alone        │    │   leave, then caches    │    │
     │  │ └────────────────────────┘    └─────────────────────────┘    │
     │  │    sleep, then all back       sleep, the policy's weights    │
     │  │                               come back, wake for weights    │
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
from functools import partial

from megarl.config import Config
from megarl.errors import EngineError
from megarl.option_list import functions
from megarl.planning.turns import GENERATING, RESIDENT, TRAINING, UPDATING, Kept, takes_turns
from megarl.rollout.scheduling.engine_handle import EngineHandle
from megarl.rollout.scheduling.engine_state import PendingResult
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.rollout.scheduling.several_engines import failures
from megarl.runs.training_side import POLICY
from megarl.workers.roles import Roles


class Owner(Enum):
    """The user of the device."""

    SHARED = "trainer and engines"
    TRAINING = "the trainer"
    UPDATING = "the engines and the policy's weights"
    GENERATING = "the engines"


class GpuSharing:
    """The state machine. A move that fails in the middle leaves it without a state: every further one is refused."""

    def __init__(
        self,
        sleep: Callable[[], None],
        wake: Callable[[], None],
        wake_caches: Callable[[], None],
        keep: Callable[[Kept], None],
    ) -> None:
        """`sleep` has the engines give up their memory, and their weights with it; `wake` has those that sleep take memory
        for weights again, `wake_caches` the rest; `keep` has the trainer have exactly so much on the device."""
        self._sleep, self._wake, self._wake_caches, self._keep = sleep, wake, wake_caches, keep
        self.now: Owner | None = Owner.SHARED

    def train(self) -> None:
        """Before anything that the trainer computes, saves or exports."""
        if self.now is not Owner.TRAINING:
            self._move(Owner.TRAINING, (Owner.SHARED, Owner.UPDATING, Owner.GENERATING))

    def update(self) -> None:
        """Before engines are given weights, all of them: if one came back while the others generate, these begin anew."""
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
            self._sleep()
            if before is not Owner.SHARED:
                self._keep(RESIDENT[TRAINING].trainer)
        elif to is Owner.UPDATING:
            if before is not Owner.TRAINING:
                self._sleep()
            self._keep(RESIDENT[UPDATING].trainer)
            self._wake()
        else:
            self._keep(RESIDENT[GENERATING].trainer)
            self._wake_caches()
        self.now = to


def put_to_sleep(scheduler: Scheduler, deadline_s: float) -> None:
    """Put all engines to sleep: requests under way are begun anew after the next update; engines that fail are restarted
    as ever."""
    scheduler.stop_all()
    scheduler.empty()
    up = [engine.number for engine in scheduler.engines if engine.restarting is None]
    failed = _failures(scheduler, up, lambda _, engine: engine.sleep(deadline_s=deadline_s), deadline_s)
    for engine, error in failed.items():
        raise EngineError(f"engine {engine} did not give up its memory: {error}")


def wake_up(scheduler: Scheduler, deadline_s: float) -> None:
    """Wake all engines that have no weights; one that was restarted meanwhile does not sleep, which is as good."""
    _failures(scheduler, scheduler.without_weights, lambda _, engine: engine.wake(deadline_s=deadline_s), deadline_s)


def wake_caches(scheduler: Scheduler, deadline_s: float) -> None:
    """Have all engines take the memory that they generate with besides weights; one that cannot is started anew."""
    up = [engine.number for engine in scheduler.engines if engine.is_up]
    failed = failures(scheduler.on_each(up, lambda _, engine: engine.wake_cache(deadline_s=deadline_s), deadline_s))
    for engine, error in failed.items():
        scheduler.fail(engine, error)


def _failures(
    scheduler: Scheduler, engines: list[int], call: Callable[[int, EngineHandle], Awaitable[None]], deadline_s: float
) -> dict[int, Exception]:
    """The engines that are well and yet did not do it, and why; the scheduler sees to those that are not well."""
    failed = failures(scheduler.on_each(engines, call, deadline_s))
    unwell = scheduler.failing(failed)
    for engine, error in unwell.items():
        scheduler.fail(engine, error)
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
    deadline_s = config.rollout.deadlines.update_s
    sleep, wake, caches = (partial(do, scheduler, deadline_s) for do in (put_to_sleep, wake_up, wake_caches))
    sharing = GpuSharing(sleep, wake, caches, roles.keep_on_device)
    return GpuTurns(sharing, range(len(scheduler.engines)), sharing.train)
