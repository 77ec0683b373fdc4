"""The driver's part of disaggregation: engines that decode are told which ones prefill, and updates begin with those that
decode.

All of it is done in the scheduler's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

from megarl.errors import DeadlineError, EngineError, WorkerError
from megarl.options.disaggregation.client import PrefillServer
from megarl.rollout.engines.capacity import EngineCapacity
from megarl.rollout.scheduling.engine_state import HEALTH_S, EngineState
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.workers.engine_calls import ANSWER_S, EngineCalls

LOOK_S = 0.05
"""Between two looks which engines have which weights."""
AGAIN_S = 5.0
"""After which engines are told again, and those that prefill are asked whether they are well."""
FAILURES = (EngineError, WorkerError, DeadlineError)


class PrefillCalls(EngineCalls):
    """An engine that prefills, as the scheduler calls it."""

    pairing: Pairing

    async def door(self) -> PrefillServer:
        """See `DisaggregatedEngine.door`."""
        door: PrefillServer = await self._answer(self.actor.call.remote("door"), "door", ANSWER_S)
        return replace(door, number=self.number)

    async def begin_update(self, version: int, base: int | None, *, deadline_s: float) -> None:
        """Wait until the engines that decode, of those that are updated now, have given up what they ask of this one."""
        await self.pairing.wait_for_decoders(deadline_s)
        await super().begin_update(version, base, deadline_s=deadline_s)


class DecodeCalls(EngineCalls):
    """An engine that decodes, as the scheduler calls it."""

    pairing: Pairing

    async def meet(self, servers: Sequence[PrefillServer]) -> None:
        """See `DisaggregatedEngine.meet`."""
        await self._answer(self.actor.call.remote("meet", servers), "meet", ANSWER_S)

    async def begin_update(self, version: int, base: int | None, *, deadline_s: float) -> None:
        """Begin an update; those that prefill wait for it."""
        self.pairing.beginning += 1
        try:
            await super().begin_update(version, base, deadline_s=deadline_s)
        finally:
            self.pairing.beginning -= 1


class Pairing:
    """Engines 0 to `prefill` - 1 of a scheduler prefill for the others."""

    def __init__(self, scheduler: Scheduler, prefill: int) -> None:
        """`scheduler` has all engines; none is open yet."""
        self._scheduler, self._prefill = scheduler, prefill
        self.beginning = 0
        """Engines that decode and that an update closes now."""
        self._doors: dict[int, PrefillServer] = {}
        self._told: dict[int, tuple[PrefillServer, ...]] = {}
        self._told_at = time.monotonic()
        scheduler.thread.run(self._begin())

    async def _begin(self) -> None:
        for state in self._scheduler.engines:
            plain = state.handle
            assert isinstance(plain, EngineCalls), "the driver made it"
            kind = PrefillCalls if state.number < self._prefill else DecodeCalls
            state.handle = handle = kind(plain.actor, plain.number)
            handle.pairing = self
        for state in self._prefilling:
            state.capacity = EngineCapacity(responses=0)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Tell engines nothing any more."""
        if self._scheduler.thread.is_open:
            self._scheduler.thread.loop.call_soon_threadsafe(self._watching.cancel)

    @property
    def _prefilling(self) -> Sequence[EngineState]:
        return self._scheduler.engines[: self._prefill]

    async def wait_for_decoders(self, deadline_s: float) -> None:
        """Wait until no update of engines that decode is just beginning; at most `deadline_s` seconds."""
        await asyncio.sleep(0)  # those of the same update begin
        ends_at = time.monotonic() + deadline_s
        while self.beginning and time.monotonic() < ends_at:
            await asyncio.sleep(LOOK_S)

    async def _watch(self) -> None:
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            self._scheduler.give_up(error)

    async def _look(self) -> None:
        """Ask engines that prefill where they are reached, once for each version, and tell the others."""
        is_due = time.monotonic() - self._told_at > AGAIN_S
        if is_due:
            self._told_at = time.monotonic()
            self._told.clear()
            await asyncio.gather(*map(self._see_to, self._prefilling))
        await asyncio.gather(*map(self._ask, self._prefilling))
        doors = tuple(self._doors[number] for number in sorted(self._doors))
        decoding = [state for state in self._scheduler.engines[self._prefill :] if state.version is not None]
        await asyncio.gather(*(self._tell(state, doors) for state in decoding if self._told.get(state.number) != doors))

    async def _ask(self, state: EngineState) -> None:
        """Know the door of an engine that prefills as long as it has weights and is open."""
        version = state.version if state.is_open.is_set() else None
        known = self._doors.get(state.number)
        if known is not None and known.version == version:
            return
        self._doors.pop(state.number, None)
        if version is not None:
            assert isinstance(state.handle, PrefillCalls), "`_begin`"
            with contextlib.suppress(*FAILURES):
                self._doors[state.number] = await state.handle.door()

    async def _tell(self, state: EngineState, doors: tuple[PrefillServer, ...]) -> None:
        assert isinstance(state.handle, DecodeCalls), "`_begin`"
        with contextlib.suppress(*FAILURES):  # whoever asks it for responses sees to it
            await state.handle.meet(doors)
            self._told[state.number] = doors

    async def _see_to(self, state: EngineState) -> None:
        """Have an engine that prefills restarted if it is not well: no request of the scheduler's would show it."""
        if state.version is None or not state.is_open.is_set():
            return
        try:
            await state.handle.health(deadline_s=HEALTH_S)
        except FAILURES as error:
            if state.version is not None:
                self._doors.pop(state.number, None)
                self._scheduler.take_down(state, error)
