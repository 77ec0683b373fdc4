"""An engine of another site as the run has it: orders that wait for the site to fetch them, and what it has answered."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megarl.errors import EngineError, WorkerError
from megarl.options.elastic_engines.sites.wire import (
    Joining,
    Order,
    Poll,
    SentResponse,
    SiteAnswer,
    checked_responses,
    sent_request,
)
from megarl.rollout.engines.capacity import EngineCapacity
from megarl.rollout.engines.protocol import EngineRequest
from megarl.rollout.engines.stored_turns import SampledTurn, with_tokens
from megarl.rollout.scheduling.engine_state import EngineState
from megarl.weights.digests import SentDigests

GRACE_S = 15.0
"""For the engine's own answer about a deadline to come first."""
LOOK_S = 0.05
Responses = list[list[SentResponse]]


class FarState(EngineState):
    """The engine as the scheduler sees it. Neither the ranks nor an update of the others wait for it."""

    @property
    def is_up(self) -> bool:
        """False: its weights are seen to by `FarMembers`."""
        return False


class FarEngine:
    """An engine that has joined: what it is to do, and what is known of it. Any thread may call its methods."""

    def __init__(self, joining: Joining) -> None:
        self.site, self.key = joining.site, secrets.token_urlsafe(24)
        self.number: int | None = None
        self.admitted: Future[int] = Future()
        """Its number, or why it has none."""
        self.heard_at = time.monotonic()
        self.version: int | None = None
        self.full_bytes = self.difference_bytes = 0
        self.leaves = self.is_leaving = self.has_left = False
        self.error = ""
        """Why it is of no use any more."""
        self.is_silent = False
        """Whether that is because it was not heard of: it may join again."""
        self.state: FarState | None = None
        self.changed: asyncio.Event | None = None
        """Set, in the server's loop, when there is something to tell the site."""
        self._lock = threading.Lock()
        self._orders: list[Order] = []
        self._given = self._polls = 0
        self._answers: dict[int, Future[Responses]] = {}
        self._wake: Callable[[], None] = lambda: None

    # what it is to do ---------------------------------------------------------------------------------------------

    def give(self, what: Any, **content: Any) -> int:
        """Give it an order; returns its number."""
        with self._lock:
            self._given += 1
            self._orders.append(Order(self._given, what, **content))
        self._wake()
        return self._given

    def ask(self, request: EngineRequest) -> tuple[int, Future[Responses]]:
        """Have it answer a request: the number of the order, and what will be its answer.

        Raises:
            WorkerError: it is lost.
        """
        sent, answer = sent_request(request), Future[Responses]()
        with self._lock:
            if self.error:
                raise WorkerError(self.error)
            self._given += 1
            number = self._given
            self._orders.append(Order(number, "generate", request=sent))
            self._answers[number] = answer
        self._wake()
        return number, answer

    def drop(self, number: int) -> None:
        """Nobody waits for an order's answer any more; if it has not come the work on it is stopped."""
        with self._lock:
            is_open = self._answers.pop(number, None) is not None
            waiting = [order for order in self._orders if order.number != number]
            was_waiting, self._orders = len(waiting) < len(self._orders), waiting
        if is_open and not was_waiting:
            self.give("stop", stop=number)

    # what it says -------------------------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Return whether there are orders that it is not known to have."""
        return len(self._orders) > 0

    def on_orders(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there is a new order, or something else to tell."""
        self._wake = wake

    def tell(self) -> None:
        """Something else than an order is new."""
        self._wake()

    def hear(self, poll: Poll) -> list[Order]:
        """Take in a poll; returns the orders that the site may not have. One that it has given up for another is nothing."""
        if poll.count < self._polls:
            return []
        self._polls = poll.count
        self.heard_at = time.monotonic()
        self.version = poll.version
        self.full_bytes, self.difference_bytes = poll.full_bytes, poll.difference_bytes
        with self._lock:
            self._orders = [order for order in self._orders if order.number > poll.seen]
            return [*self._orders]

    def answer(self, answer: SiteAnswer) -> None:
        """Take an answer; one that nobody waits for (any more) is nothing. An engine that fails is of no use any more."""
        self.heard_at = time.monotonic()
        if answer.responses is None:
            self.lose(f"the engine of {self.site} failed: {answer.error}")
            return
        with self._lock:
            waiting = self._answers.pop(answer.order, None)
        if waiting is not None and waiting.set_running_or_notify_cancel():
            waiting.set_result(answer.responses)

    def lose(self, why: str) -> None:
        """Take note that it is of no use any more: what it works on fails."""
        with self._lock:
            self.error = self.error or why
            waiting, self._answers = [*self._answers.values()], {}
        for answer in waiting:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(WorkerError(self.error))


class FarCalls:
    """A `FarEngine` as the scheduler calls it (`rollout.scheduling.engine_handle.EngineHandle`)."""

    def __init__(self, engine: FarEngine, vocabulary: int, newest: Callable[[], int]) -> None:
        """`vocabulary`: token ids there are. `newest`: the version of the policy now."""
        self._engine, self._vocabulary, self._newest = engine, vocabulary, newest

    async def generate(self, request: EngineRequest) -> list[list[SampledTurn]]:
        """Ask the engine. What is no group's, such as an evaluation, waits for the newest weights.

        Raises:
            WorkerError: the engine is lost, or answered what is no answer, or nothing in time.
        """
        engine, ends_at = self._engine, time.monotonic() + request.deadline_s + GRACE_S
        while self._is_asked(request) and engine.version != self._newest():
            await self.health(deadline_s=0.0)
            await asyncio.sleep(LOOK_S)
        request = await asyncio.to_thread(with_tokens, request)
        number, answer = engine.ask(request)
        try:
            async with asyncio.timeout(max(0.0, ends_at - time.monotonic())):
                sent = await asyncio.wrap_future(answer)
            return [[*of_prompt] for of_prompt in await asyncio.to_thread(checked_responses, request, sent, self._vocabulary)]
        except TimeoutError:
            engine.lose(f"the engine of {engine.site} did not answer within {request.deadline_s:.0f} s")
        except EngineError as error:
            engine.lose(f"the engine of {engine.site} failed: {error}")
        finally:
            engine.drop(number)
        raise WorkerError(engine.error)

    def _is_asked(self, request: EngineRequest) -> bool:
        """Return whether somebody asks who does not say which weights are to answer."""
        state = self._engine.state
        requests = state.requests.values() if state is not None else ()
        return any(r.answer is not None and r.asked is not None and id(request) in r.asked.under_way for r in requests)

    async def cut(self, keys: Sequence[str], *, deadline_s: float) -> None:
        """Tell it; the answers come to whoever waits for them."""
        self._engine.give("cut", words=[*keys])

    async def end_conversations(self, names: Sequence[str], *, deadline_s: float) -> None:
        """Tell it."""
        self._engine.give("end_conversations", words=[*names])

    async def capacity(self, *, deadline_s: float) -> EngineCapacity:
        """Return that nothing is known of its room."""
        return EngineCapacity()

    async def take_ended(self, *, deadline_s: float) -> list[str]:
        """Refuse: it does not say."""
        raise EngineError("an engine of another site does not say which responses have ended")

    async def health(self, *, deadline_s: float) -> None:
        """Raise WorkerError if it is lost."""
        if self._engine.error:
            raise WorkerError(self._engine.error)

    async def begin_update(self, version: int, base: int | None, *, deadline_s: float) -> None:
        """Refuse: it fetches its weights itself."""
        raise EngineError("an engine of another site fetches its weights itself")

    async def load_update(self, folder: str, *, deadline_s: float) -> None:
        """Refuse."""
        await self.begin_update(0, None, deadline_s=deadline_s)

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None, *, deadline_s: float) -> None:
        """Refuse."""
        await self.begin_update(version, None, deadline_s=deadline_s)

    async def end_update_by_sums(self, version: int, sent: SentDigests, *, deadline_s: float) -> Sequence[int]:
        """Refuse."""
        raise EngineError("an engine of another site fetches its weights itself")

    async def abandon_update(self, *, deadline_s: float) -> None:
        """There is none."""

    async def sleep(self, *, deadline_s: float) -> None:
        """Refuse."""
        raise EngineError("an engine of another site has its own memory")

    async def wake_cache(self, *, deadline_s: float) -> None:
        """Not asked for: such an engine shares no GPU with a trainer."""

    async def wake(self, *, deadline_s: float) -> None:
        """Refuse."""
        raise EngineError("an engine of another site does not sleep")

    async def restart(self, deadline_s: float) -> None:
        """Refuse: the site starts it again, and joins with it."""
        raise WorkerError(self._engine.error or f"the engine of {self._engine.site} is restarted there, if at all")

    async def end(self) -> None:
        """Count it as lost."""
        self._engine.lose(f"the engine of {self._engine.site} failed for good")
