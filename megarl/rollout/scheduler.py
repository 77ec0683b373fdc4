"""Sends groups to engines and collects them: an asyncio loop in a thread of the driver, between a ledger and the engines.

All state belongs to the loop's thread; the driver's calls wait for their turn there. Nothing here knows of Ray: an engine is
whatever an `EngineClient` reaches.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from megarl.data.sample import Prompt, Sample
from megarl.errors import DeadlineError, EngineError, MegarlError, WorkerError
from megarl.observe.trace import Span
from megarl.rollout.engine_slot import Answer, EngineClient, Request, Respond, Slot
from megarl.rollout.ledger import Ledger

T = TypeVar("T")
FAILURES = (
    3  # of an engine in a row, or of a request on engines that are well, before the run ends with the last one's sentence
)


@dataclass(frozen=True)
class Groups:
    """A batch: prompts in order, each one's samples, and how many versions old its start is."""

    prompts: list[Prompt]
    samples: list[list[Sample]]
    staleness: list[int]


class Scheduler:
    """Keeps the engines busy with what the ledger lets start: least-loaded first, a group's samples all on one engine.

    An engine that fails loses nothing: its groups go back to the ledger, it is started anew if it is not well, and the
    driver finds it in `without_weights`.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        ledger: Ledger,
        respond: Respond,
        *,
        groups_per_request: int = 1,
        groups_per_engine: int = 64,
        restart_deadline_s: float = 300.0,
    ) -> None:
        """`groups_per_request`: more than 1 for an engine that computes one request after the other.

        `groups_per_engine` bounds what is sent to an engine; the rest waits here for whichever engine is free first.
        """
        self.ledger, self.respond = ledger, respond
        self.groups_per_request, self.groups_per_engine = groups_per_request, groups_per_engine
        self.restart_deadline_s = restart_deadline_s
        self._prompts: dict[int, Prompt] = {}
        self._groups: dict[int, list[Sample]] = {}
        self._asked: deque[Request] = deque()
        self._retried: dict[int, int] = {}  # failures by ticket, on engines that were well
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-scheduler", daemon=True)
        self._thread.start()
        self._changed, self.slots = self._in_loop(self._make(clients), 30)

    async def _make(self, clients: Sequence[EngineClient]) -> tuple[asyncio.Event, list[Slot]]:
        return asyncio.Event(), [Slot(number, client) for number, client in enumerate(clients)]

    def close(self) -> None:
        """Stop all work and the thread."""
        if not self._loop.is_running():
            return
        self._in_loop(self._stop(), 60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    # the driver's side: batches -----------------------------------------------------------------------------------

    def open_step(self, version: int, next_prompts: Callable[[int], list[Prompt]], due: int | None = None) -> None:
        """The next batch is for a policy of `version`; as many prompts are drawn as there may be use for before it is taken."""

        async def opened() -> int:
            self._discard(self.ledger.open_step(version, due))
            return self.ledger.room

        room = self._in_loop(opened())
        if room:
            self.add(next_prompts(room))

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Queue a ticket for each prompt."""

        async def added() -> None:
            self._prompts |= dict(zip(self.ledger.add(len(prompts)), prompts, strict=True))
            self._dispatch()

        self._in_loop(added())

    def wait(self, deadline_s: float, answers: Sequence[Answer] | None = None) -> bool:
        """Wait until the batch that is due, or `answers`, are there (True), or engines wait for weights meanwhile (False).

        Raises:
            DeadlineError: neither, `deadline_s` seconds later.
            MegarlError: an engine failed for good, or what the user wrote for an episode did.
        """
        done = self.ledger.ready if answers is None else lambda: all(answer.done() for answer in answers)
        return self._in_loop(self._until(done, deadline_s), deadline_s + 30)

    def take(self) -> Groups:
        """The batch that is due, after `wait` returned True."""

        async def taken() -> Groups:
            batch = self.ledger.take()
            prompts = [self._prompts.pop(number) for number in batch.numbers]
            samples = [self._groups.pop(number) for number in batch.numbers]
            self._discard(batch.dropped)
            return Groups(prompts, samples, batch.staleness)

        return self._in_loop(taken())

    def stop_all(self) -> None:
        """Put what is under way back into the queue, and have the engines stop working on it."""

        async def stopped() -> None:
            numbers = [n for slot in self.slots for r in slot.requests.values() for n in r.tickets if n is not None]
            self.ledger.put_back(numbers)
            self._forget(numbers)

        self._in_loop(stopped())

    def ask(self, prompts: Sequence[Prompt], respond: Respond, per_request: int) -> list[Answer]:
        """Have `prompts` answered by whatever weights the engines have, before any ticket; `wait` for what it returns.

        `per_request`: so many of them are as much work for an engine as `groups_per_request` groups.
        """

        async def asked() -> list[Answer]:
            starts = range(0, len(prompts), per_request)
            answers: list[Answer] = [self._loop.create_future() for _ in starts]
            for start, answer in zip(starts, answers, strict=True):
                part = list(prompts[start : start + per_request])
                self._asked.append(Request(part, respond, self.groups_per_request, answer=answer))
            self._dispatch()
            return answers

        return self._in_loop(asked())

    # the driver's side: engines and weights ------------------------------------------------------------------------

    @property
    def without_weights(self) -> list[int]:
        """Engines that are up and wait for weights."""
        return [slot.number for slot in self.slots if slot.version is None and slot.restarting is None]

    @property
    def serving(self) -> list[int]:
        """Engines that have weights."""
        return [slot.number for slot in self.slots if slot.version is not None]

    def take_spans(self) -> list[list[Span]]:
        """By engine, when it was answering requests since the last call."""

        async def taken() -> list[list[Span]]:
            return [slot.busy.take() for slot in self.slots]

        return self._in_loop(taken())

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]], deadline_s: float) -> dict[int, Any]:
        """Call `method` on several engines at once; by engine its answer, or the exception that it raised."""

        async def called() -> dict[int, Any]:
            calls = (self.slots[number].client.call(method, *args, deadline_s=deadline_s) for number, args in arguments.items())
            return dict(zip(arguments, await asyncio.gather(*calls, return_exceptions=True), strict=True))

        return self._in_loop(called(), deadline_s + 30)

    def hold(self, engines: Sequence[int]) -> None:
        """Keep new requests from these engines; what is under way there stays. `resume` or `fail` must follow."""

        async def held() -> None:
            for slot in (self.slots[number] for number in engines):
                if slot.version is not None:
                    slot.failures = 0  # it has kept well since the last update
                slot.is_open.clear()
                slot.fell_behind = False

        self._in_loop(held())

    def resume(self, engines: Sequence[int], version: int) -> None:
        """These engines have the weights of `version`, unless they failed since."""

        async def resumed() -> None:
            for slot in (self.slots[number] for number in engines):
                if not slot.fell_behind:
                    slot.version = version
                    slot.is_open.set()
            self._dispatch()

        self._in_loop(resumed())

    def empty(self) -> None:
        """No engine has weights that are of use: each waits for an update."""

        async def emptied() -> None:
            for slot in self.slots:
                slot.version = None
                slot.is_open.clear()

        self._in_loop(emptied())

    def fail(self, engine: int, error: Exception) -> None:
        """This engine failed in an update."""

        async def failed() -> None:
            self._take_down(self.slots[engine], error)

        self._in_loop(failed())

    # checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The ledger's state, the prompts of all unconsumed tickets and the samples of finished ones, JSON-able."""

        async def state() -> dict[str, Any]:
            ledger = self.ledger.state_dict()
            prompts = [asdict(self._prompts[number]) for number in self.ledger.unconsumed]
            samples = [[asdict(sample) for sample in self._groups[number]] for number, *_ in ledger["finished"]]
            return {"ledger": ledger, "prompts": prompts, "samples": samples}

        return self._in_loop(state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`'s answer: what was finished is, and every other unconsumed prompt is queued."""

        async def load() -> None:
            self.ledger.load_state_dict(state["ledger"])
            finished = (number for number, *_ in state["ledger"].get("finished", []))
            groups = ([Sample(**sample) for sample in group] for group in state.get("samples", []))
            self._groups = dict(zip(finished, groups, strict=True))
            self._prompts = {n: Prompt(**prompt) for n, prompt in zip(self.ledger.unconsumed, state["prompts"], strict=True)}

        self._in_loop(load())

    # in the loop --------------------------------------------------------------------------------------------------

    def _in_loop(self, work: Coroutine[Any, Any, T], deadline_s: float = 60.0) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise DeadlineError(
                f"the loop that drives the engines did not answer within {deadline_s:.0f} s; an episode of your own may hold "
                "it up between two awaits"
            ) from None

    async def _until(self, done: Callable[[], bool], deadline_s: float) -> bool:
        ends_at = self._loop.time() + deadline_s
        while True:
            if self._error is not None:
                raise self._error
            if done():
                return True
            if self.without_weights:
                return False
            self._changed.clear()
            try:
                async with asyncio.timeout_at(ends_at):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineError(f"phase 'generate' was not done after {deadline_s:.0f} s: {self._standing()}") from None

    def _standing(self) -> str:
        engines = ", ".join(
            f"engine {slot.number} {'is down' if slot.version is None else f'works on {slot.load}'}" for slot in self.slots
        )
        ledger = self.ledger
        return f"{ledger.count('finished')} groups are finished, {ledger.count('queued')} wait, {engines}"

    def _dispatch(self) -> None:
        """Start whatever may start now, the least-loaded engine first."""
        while self._error is None:
            free = [slot for slot in self.slots if slot.is_open.is_set() and slot.load < self.groups_per_engine]
            if not any(self._start_on(slot) for slot in _in_turn(free)):
                break
        self._changed.set()

    def _start_on(self, slot: Slot) -> bool:
        if self._asked:
            request = self._asked.popleft()
        else:
            assert slot.version is not None, "only engines that serve are given work"
            limit = min(self.groups_per_request, self.groups_per_engine - slot.load)
            tickets = self.ledger.start(slot.version, limit)
            if not tickets:
                return False
            request = Request([self._prompts[n] for n in tickets], self.respond, len(tickets), list(tickets))
        slot.requests[self._loop.create_task(self._serve(slot, request))] = request
        return True

    async def _serve(self, slot: Slot, request: Request) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            groups = await request.respond(slot, request.prompts)
        except (EngineError, WorkerError) as error:
            if slot.requests.pop(task, None) is not None:  # else nobody waits for it any more
                await self._retry(slot, request, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            self._give_up(error)
        else:
            if task in slot.requests:
                slot.failures = 0
                self._keep(request, groups)
        finally:
            slot.requests.pop(task, None)
            self._dispatch()

    def _keep(self, request: Request, groups: list[list[Sample]]) -> None:
        if request.answer is not None:
            if not request.answer.done():
                request.answer.set_result(groups)
            return
        for number, group in zip(request.tickets, groups, strict=True):
            if number is not None:
                self._groups[number] = group
                self.ledger.finish(number)

    async def _retry(self, slot: Slot, request: Request, error: Exception) -> None:
        """A request came to nothing: it is queued again, and its engine looked at."""
        self._queue_again(request)
        if slot.version is None:
            return  # the engine is being seen to already
        try:
            await slot.client.call("health", deadline_s=10.0)
        except (EngineError, WorkerError, DeadlineError):
            self._take_down(slot, error)
            return
        request.failures += 1
        failures = max([request.failures, *(self._count_failure(n) for n in request.tickets if n is not None)])
        if failures >= FAILURES:
            self._give_up(error)

    def _count_failure(self, number: int) -> int:
        self._retried[number] = self._retried.get(number, 0) + 1
        return self._retried[number]

    def _queue_again(self, request: Request) -> None:
        if request.answer is not None:
            self._asked.appendleft(request)
        else:
            self.ledger.put_back([number for number in request.tickets if number is not None])

    def _take_down(self, slot: Slot, error: Exception) -> None:
        """The engine failed: whatever it was working on is queued again, and it is started anew if it is not well."""
        slot.failures += not slot.fell_behind  # one death may be noticed by several requests and an update
        slot.version, slot.error, slot.fell_behind = None, error, True
        slot.is_open.clear()
        for task, request in list(slot.requests.items()):
            del slot.requests[task]
            task.cancel()
            self._queue_again(request)
        if slot.failures > FAILURES:
            self._give_up(EngineError(f"engine {slot.number} failed {slot.failures} times in a row, at last with: {error}"))
        elif slot.restarting is None:
            slot.restarting = self._loop.create_task(self._restart(slot))
        self._dispatch()

    async def _restart(self, slot: Slot) -> None:
        try:
            while True:
                try:
                    await slot.client.call("health", deadline_s=10.0)
                    return
                except (EngineError, WorkerError, DeadlineError):
                    pass
                try:
                    await slot.client.restart(self.restart_deadline_s)
                    return
                except (EngineError, WorkerError, DeadlineError) as error:
                    slot.failures += 1
                    if slot.failures > FAILURES:
                        raise EngineError(
                            f"engine {slot.number} could not be started anew in {slot.failures} tries: {error}"
                        ) from error
        except MegarlError as error:
            self._give_up(error)
        finally:
            slot.restarting = None
            self._changed.set()

    def _discard(self, numbers: Sequence[int]) -> None:
        """These tickets are queued again; what there is of their responses is thrown away."""
        for number in numbers:
            self._groups.pop(number, None)
        self._forget(numbers)
        self._dispatch()

    def _forget(self, numbers: Sequence[int]) -> None:
        gone = set(numbers)
        for slot in self.slots:
            for task, request in list(slot.requests.items()):
                if gone & set(request.tickets):
                    request.tickets = [None if number in gone else number for number in request.tickets]
                    if set(request.tickets) == {None}:
                        del slot.requests[task]
                        task.cancel()

    def _give_up(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()

    async def _stop(self) -> None:
        tasks = [*(task for slot in self.slots for task in slot.requests), *(s.restarting for s in self.slots if s.restarting)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_turn(free: Sequence[Slot]) -> Iterator[Slot]:
    """Least-loaded first; after one for whose weights there was nothing to start, only those with newer ones."""
    newest = -1
    for slot in sorted(free, key=lambda slot: (slot.load, slot.number)):
        if slot.version is not None and slot.version > newest:
            yield slot
            newest = slot.version
