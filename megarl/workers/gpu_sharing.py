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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from megarl.config import Config
from megarl.errors import EngineError, WorkerError
from megarl.option_list import functions
from megarl.planning.turns import GENERATING, RESIDENT, TRAINING, UPDATING, Kept, takes_turns
from megarl.rollout.scheduling.engine_state import FAILURES, PendingResult
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


REST_S = 120.0
"""For what engines work on to be cut, and kept."""


class EnginesInTurns:
    """`numbers` of `scheduler`. None of them is lost sight of: one that fails is told, and started anew when it is to work.

    One that fails again and again is left out, and the run goes on, if it is dispensable.
    """

    def __init__(
        self, scheduler: Scheduler, numbers: Sequence[int], *, restart_s: float, call_s: float, alone: bool = False
    ) -> None:
        """`restart_s`: for an engine that is being started anew. `call_s`: for one to give up memory, or to take it again.
        `alone`: there are no others, so that an update is always one of these, too, and wakes them."""
        self.scheduler, self.numbers, self._alone = scheduler, tuple(numbers), alone
        self._rest_s, self._call_s = REST_S + restart_s, call_s

    @property
    def awake(self) -> list[int]:
        """Engines that may be given weights."""
        return [number for number in self.numbers if self.scheduler.engines[number].is_up]

    def rest(self) -> None:
        """Have all of them give up their memory; what they work on goes on elsewhere, from the tokens that it has.

        One that does not is told, and its process ended: the memory is the trainer's in any case.
        """
        scheduler = self.scheduler
        states = [scheduler.engines[number] for number in self.numbers if not scheduler.engines[number].rests]
        scheduler.thread.run(scheduler.vacate(states), self._rest_s)
        up = [state.number for state in states if not state.is_left_out]
        asleep = scheduler.on_each(up, lambda _, engine: engine.sleep(deadline_s=self._call_s), self._call_s)
        for number, error in failures(asleep).items():
            scheduler.thread.run(self._end(number, error), self._call_s)
        if self._alone:
            scheduler.thread.run(self._let_work())

    async def _end(self, number: int, error: Exception) -> None:
        state = self.scheduler.engines[number]
        self.scheduler.restarts.note(state, error)
        state.fell_behind = True  # it is known to be gone when it is woken
        if not isinstance(error, WorkerError):  # else its process is gone, and its memory with it
            await state.handle.end()

    def wake(self) -> None:
        """Have all of them take memory again; they have no weights then. Those that are gone are being started anew."""
        scheduler = self.scheduler
        scheduler.thread.run(self._let_work())
        called = scheduler.on_each(self.awake, lambda _, engine: engine.wake(deadline_s=self._call_s), self._call_s)
        for number, error in failures(called).items():
            scheduler.fail(number, error)

    def wake_caches(self) -> None:
        """Have those that are up take the memory that they generate with."""
        called = self.scheduler.on_each(self.awake, lambda _, engine: engine.wake_cache(deadline_s=self._call_s), self._call_s)
        for number, error in failures(called).items():
            self.scheduler.fail(number, error)

    async def _let_work(self) -> None:
        for number in self.numbers:
            state = self.scheduler.engines[number]
            state.rests = state.is_left_out


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
    engines = EnginesInTurns(
        scheduler,
        range(len(scheduler.engines)),
        restart_s=(FAILURES + 1) * scheduler.restarts.deadline_s,
        call_s=config.rollout.deadlines.update_s,
        alone=True,
    )
    sharing = GpuSharing(engines.rest, engines.wake, engines.wake_caches, roles.keep_on_device)
    return GpuTurns(sharing, engines.numbers, sharing.train)
