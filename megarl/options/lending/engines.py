"""The engines of a scheduler that stand on the trainer's GPUs: they work from `wake` until `rest`, and sleep otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.errors import WorkerError
from megarl.rollout.scheduling.engine_state import PendingResult, failures

if TYPE_CHECKING:
    from megarl.rollout.scheduling.scheduler import Scheduler

REST_S = 120.0
"""For what engines work on to be cut, and kept."""


class LentEngines:
    """`numbers` of `scheduler`. None of them is lost sight of: one that fails is told, and started anew when it is to work.

    One that fails again and again is left out, and the run goes on.
    """

    def __init__(self, scheduler: Scheduler, numbers: Sequence[int], *, restart_s: float, call_s: float) -> None:
        """`restart_s`: for an engine that is being started anew. `call_s`: for one to give up memory, or to take it again."""
        self.scheduler, self.numbers = scheduler, tuple(numbers)
        self._rest_s, self._call_s = REST_S + restart_s, call_s

    @property
    def awake(self) -> list[int]:
        """Engines that may be given weights."""
        return [number for number in self.numbers if self.scheduler.engines[number].is_up]

    @property
    def sampled_tokens(self) -> int:
        """Count the tokens that they have answered with so far."""
        return sum(self.scheduler.engines[number].sampled_tokens for number in self.numbers)

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

    async def _end(self, number: int, error: Exception) -> None:
        state = self.scheduler.engines[number]
        self.scheduler.note_failure(state, error)
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

    async def _let_work(self) -> None:
        for number in self.numbers:
            state = self.scheduler.engines[number]
            state.rests = state.is_left_out

    def work_for(self, version: int, answers: Sequence[PendingResult] | None = None) -> int:
        """Number of groups and asked requests that they could start now under weights of `version`.

        0 if the batch that is due, or `answers`, are there.
        """

        async def counted() -> int:
            scheduler = self.scheduler
            is_done = scheduler.manager.ready() if answers is None else all(answer.done() for answer in answers)
            return 0 if is_done else scheduler.work_for(version)

        return self.scheduler.thread.run(counted())
