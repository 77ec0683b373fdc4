"""Sends groups to engines and collects them: an asyncio loop in a thread of the driver.

All state belongs to the loop's thread. Methods that are `in_loop` are called by the driver, and wait for their turn there.
Nothing here knows of Ray: an engine is whatever an `EngineHandle` reaches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, TypeVar

from megarl.core.staleness_manager import StalenessManager
from megarl.data.sample import Prompt, RolloutBatch, Sample, read_record
from megarl.errors import DeadlineError, EngineError, WorkerError
from megarl.observe.trace import Span
from megarl.rollout.scheduling.engine_handle import EngineHandle
from megarl.rollout.scheduling.engine_order import EngineOrder
from megarl.rollout.scheduling.engine_state import (
    HEALTH_S,
    EngineState,
    GenerateGroups,
    PendingResult,
    PromptRequest,
)
from megarl.rollout.scheduling.loop_thread import LoopThread, in_loop
from megarl.rollout.scheduling.partial_groups import PartialGroups
from megarl.rollout.scheduling.restarts import EngineRestarts
from megarl.rollout.scheduling.several_engines import all_done, cut_short, failures, progress_text

T = TypeVar("T")
CUT_S = 20.0
"""For an engine to say what it has of responses that are cut."""
AT_ONCE = 256
"""Requests that are started before whatever else the loop has to do has its turn."""


class Scheduler:
    """Keeps the engines busy with what the staleness manager lets start.

    The least-loaded engine with room (`EngineOrder`) is given work first; all turns of a group's samples come from one engine.

    An engine that fails loses nothing: its groups go back to the manager, it is started anew if it is not well, and the
    driver finds it in `without_weights`. Without one that is `dispensable` the run goes on if it fails for good.
    """

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        manager: StalenessManager,
        generate_groups: GenerateGroups,
        *,
        groups_per_request: int = 1,
        groups_per_engine: int = 64,
        samples_per_group: int = 1,
        reports: bool = False,
        restart_deadline_s: float = 300.0,
        cuts: bool = False,
        keeps_turns: bool = False,
        dispensable: Sequence[int] = (),
        say: Callable[[str], None] | None = None,
        finished: Callable[[list[Sample]], None] = lambda group: None,
        thread: LoopThread | None = None,
    ) -> None:
        """`groups_per_request`: more than 1 for an engine that computes one request after the other.

        `groups_per_engine`, `samples_per_group` and `reports` bound what is sent to an engine, as
        `EngineOrder` says; the rest waits here for whichever engine is free first. `thread`: None: its own. `cuts`:
        engines that are to stop are asked for what they have (`Engine.cut`), which is counted, or kept if the manager
        `continues`, or engines are `dispensable`. `keeps_turns`: they are told of conversations. `say` is told in a line, from
        another thread, when an engine fails; `finished` is given each group there.
        """
        self.manager, self.generate_groups = manager, generate_groups
        self.groups_per_request = groups_per_request
        self.restarts = EngineRestarts(restart_deadline_s, say, self.give_up, lambda: self.changed.set())
        self.cuts, self.finished = cuts, finished
        self.partial = PartialGroups(continues=manager.continues or len(dispensable) > 0)
        self._ending: dict[asyncio.Task[None], asyncio.Task[None]] = {}
        self._prompts: dict[int, Prompt] = {}
        self._groups: dict[int, list[Sample]] = {}
        self._asked: deque[PromptRequest] = deque()
        self._error: BaseException | None = None
        self.is_short = False  # too few engines to go on: nothing starts; who changes it sets `changed` and calls `dispatch`
        self._goes_on = False  # starting was interrupted after `AT_ONCE` requests, and goes on
        self.thread = thread or LoopThread("rollout-scheduler")
        self._loop = self.thread.loop
        self.changed, self.engines = self.thread.run(self._make(handles), 30)
        for engine in self.engines:
            engine.keeps_turns, engine.is_dispensable = keeps_turns, engine.number in dispensable
        self.order = EngineOrder(self.engines, self.dispatch, groups_per_engine, samples_per_group, reports=reports)

    async def _make(self, handles: Sequence[EngineHandle]) -> tuple[asyncio.Event, list[EngineState]]:
        return asyncio.Event(), [EngineState(number, handle) for number, handle in enumerate(handles)]

    def close(self) -> None:
        """Stop all work and the thread."""
        if self.thread.is_open:
            self.thread.run(self._stop(), 60)
            self.thread.close()

    # the driver's side: batches -----------------------------------------------------------------------------------

    def open_step(self, version: int, next_prompts: Callable[[int], list[Prompt]], due: int | None = None) -> None:
        """The next batch is for a policy of `version`; as many prompts are drawn as there may be use for before it is taken."""
        if room := self._open(version, due):
            self.add(next_prompts(room))

    @in_loop
    async def _open(self, version: int, due: int | None) -> int:
        self._discard(self.manager.open_step(version, due))
        return self.manager.room

    @in_loop
    async def add(self, prompts: Sequence[Prompt]) -> None:
        """Queue a prompt group for each prompt."""
        self._prompts |= dict(zip(self.manager.add(len(prompts)), prompts, strict=True))
        self.dispatch()

    def wait(self, deadline_s: float, answers: Sequence[PendingResult] | None = None) -> bool:
        """Wait until the batch that is due, or `answers`, are there (True), or engines wait for weights meanwhile (False).

        Raises:
            DeadlineError: neither, `deadline_s` seconds later.
            MegarlError: an engine failed for good, or what the user wrote for an episode did.
        """
        done = self.manager.ready if answers is None else all_done(answers)
        return self.thread.run(self._until(done, deadline_s), deadline_s + 30)

    @in_loop
    async def pop_batch(self) -> RolloutBatch:
        """The batch that is due, after `wait` returned True."""
        batch = self.manager.pop_batch()
        prompts = [self._prompts.pop(number) for number in batch.numbers]
        samples = [self._groups.pop(number) for number in batch.numbers]
        for number, group in zip(batch.numbers, samples, strict=True):
            self.partial.consume(number, group)
        self._discard(batch.dropped)
        if self.manager.continues and not self.manager.staleness:  # nothing is sampled while the trainer works
            await self._suspend(self.engines)
        await asyncio.gather(*self._ending.values())
        return RolloutBatch(prompts, samples, batch.staleness)

    @in_loop
    async def stop_all(self) -> None:
        """Put what is under way back into the queue, and have the engines stop working on it."""
        await self._suspend(self.engines)

    @in_loop
    async def ask(
        self, prompts: Sequence[Prompt], generate_groups: GenerateGroups, per_request: int, n: int | None = None
    ) -> list[PendingResult]:
        """Have `prompts` answered by whatever weights the engines have, before any queued group; `wait` for what it returns.

        `per_request` prompts go to an engine together; each is answered `n` times (None: as often as a group's).
        """
        starts = range(0, len(prompts), per_request)
        answers: list[PendingResult] = [self._loop.create_future() for _ in starts]
        for start, answer in zip(starts, answers, strict=True):
            part = list(prompts[start : start + per_request])
            self._asked.append(PromptRequest(part, generate_groups, len(part), answer=answer, n=n))
        self.dispatch()
        return answers

    # the driver's side: engines and weights ------------------------------------------------------------------------

    @property
    def without_weights(self) -> list[int]:
        """Engines that are up and wait for weights."""
        return [engine.number for engine in self.engines if engine.waits_for_weights]

    @in_loop
    async def take_spans(self) -> list[list[Span]]:
        """By engine, when it was answering requests since the last call."""
        return [engine.busy.take() for engine in self.engines]

    def on_each(
        self, engines: Iterable[int], call: Callable[[int, EngineHandle], Awaitable[T]], deadline_s: float
    ) -> dict[int, T | Exception]:
        """Await `call` on several engines at once; by engine its answer, or the exception that it raised."""
        numbers = list(engines)
        return dict(zip(numbers, self.thread.run(self._on_each(numbers, call), deadline_s + 30), strict=True))

    async def _on_each(self, engines: Sequence[int], call: Callable[[int, EngineHandle], Awaitable[T]]) -> list[T | Exception]:
        return await asyncio.gather(*(self._answer(number, call) for number in engines))

    async def _answer(self, engine: int, call: Callable[[int, EngineHandle], Awaitable[T]]) -> T | Exception:
        try:
            return await call(engine, self.engines[engine].handle)
        except Exception as error:  # noqa: BLE001 - whoever asked decides which of them end the run
            return error

    def failing(self, engines: Iterable[int]) -> dict[int, Exception]:
        """Engines that are not well, and why."""
        return failures(self.on_each(engines, lambda _, engine: engine.health(deadline_s=HEALTH_S), HEALTH_S))

    @in_loop
    async def hold(self, engines: Sequence[int]) -> None:
        """Keep new requests from these engines; what is under way there stays. `resume` or `fail` must follow."""
        for engine in (self.engines[number] for number in engines):
            if engine.version is not None:
                engine.failures = 0  # it has kept well since the last update
            self._shut(engine)
            engine.fell_behind = False

    @in_loop
    async def resume(self, engines: Sequence[int], version: int) -> None:
        """These engines have the weights of `version`, unless they failed since."""
        for engine in (self.engines[number] for number in engines):
            if not engine.fell_behind and not engine.rests:
                engine.version = version
                engine.is_open.set()
                self.order.changed(engine)
                self.order.watch(engine)
        self.dispatch()

    @in_loop
    async def empty(self) -> None:
        """No engine has weights that are of use: each waits for an update."""
        for engine in self.engines:
            engine.version = None
            self._shut(engine)

    @in_loop
    async def fail(self, engine: int, error: Exception) -> None:
        """This engine failed in an update."""
        self.take_down(self.engines[engine], error)

    # checkpoints --------------------------------------------------------------------------------------------------

    @in_loop
    async def state_dict(self) -> dict[str, Any]:
        """The manager's state, the prompts of all unconsumed groups, the samples of finished ones and what there is of those
        that go on, JSON-able."""
        manager = self.manager.state_dict()
        prompts = [asdict(self._prompts[number]) for number in self.manager.unconsumed]
        samples = [[sample.to_dict() for sample in self._groups[number]] for number, *_ in manager["finished"]]
        partial = self.partial.state_dict(self._groups)
        return {"ledger": manager, "prompts": prompts, "samples": samples, "partial": partial}  # its name in checkpoints

    @in_loop
    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`'s answer: what was finished is, every other unconsumed prompt is queued."""
        self.manager.load_state_dict(state["ledger"], self.partial.load_state_dict(state.get("partial", {})))
        finished = (number for number, *_ in state["ledger"].get("finished", []))
        groups = ([read_record(Sample, sample) for sample in group] for group in state.get("samples", []))
        self._groups = dict(zip(finished, groups, strict=True))
        self._prompts = {
            n: read_record(Prompt, prompt) for n, prompt in zip(self.manager.unconsumed, state["prompts"], strict=True)
        }

    # in the loop --------------------------------------------------------------------------------------------------

    async def _until(self, done: Callable[[], bool], deadline_s: float) -> bool:
        ends_at = self._loop.time() + deadline_s
        while True:
            if self._error is not None:
                raise self._error
            if done():
                return True
            if self.without_weights or self.is_short:
                return False
            self.changed.clear()
            try:
                async with asyncio.timeout_at(ends_at):
                    await self.changed.wait()
            except TimeoutError:
                finished, waiting = self.manager.count("finished"), self.manager.count("queued")
                raise DeadlineError(
                    f"phase 'generate' was not done after {deadline_s:.0f} s: {finished} groups are finished, {waiting} wait, "
                    f"{progress_text(self.engines)}"
                ) from None

    def _shut(self, engine: EngineState) -> None:
        engine.is_open.clear()
        self.order.changed(engine)

    def dispatch(self) -> None:
        """Start what may start now, the least-loaded engine first.

        After one for whose weights there was nothing to start, only those with newer ones.
        """
        newest = -1
        for _ in range(AT_ONCE if not self._goes_on else 0):
            has_work = self._error is None and not self.is_short and (self._asked or self.manager.count("queued"))
            engine = self.order.first(newest) if has_work else None
            if engine is None:
                return
            if not self._start_on(engine):
                newest = engine.version or 0
        if not self._goes_on:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self.dispatch()

    def _start_on(self, engine: EngineState) -> bool:
        if self._asked:
            request = self._asked.popleft()
        else:
            assert engine.version is not None, "only engines that serve are given work"
            numbers = self.manager.start(engine.version, min(self.groups_per_request, self.order.room(engine)))
            if not numbers:
                return False
            request = PromptRequest([*map(self._prompts.__getitem__, numbers)], self.generate_groups, len(numbers), [*numbers])
            request.partial = [self.partial.of(number) for number in numbers] if self.cuts else None
        self.order.take(engine, self._loop.create_task(self._serve(engine, request)), request)
        return True

    async def _serve(self, engine: EngineState, request: PromptRequest) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            assert request.asked is not None, "an engine works on it"
            groups = await request.generate_groups(request.asked)
        except (EngineError, WorkerError) as error:
            if self.order.drop(engine, task) is not None:  # else nobody waits for it any more
                await self._retry(engine, request, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            self.give_up(error)
        else:
            if task in engine.requests:
                engine.failures = 0
                self._keep(request, groups)
        finally:
            self.order.drop(engine, task)
            self.dispatch()

    def _keep(self, request: PromptRequest, groups: list[list[Sample]]) -> None:
        if request.answer is not None:
            if not request.answer.done():
                request.answer.set_result(groups)
            self.changed.set()
            return
        for index, (number, group) in enumerate(zip(request.numbers, groups, strict=True)):
            if number is None:
                self.partial.aborted_tokens += request.partial[index].empty() if request.partial is not None else 0
            else:
                self._groups[number] = group
                self.manager.finish(number)
                self.finished(group)
        if self.manager.ready():
            self.changed.set()

    async def _retry(self, engine: EngineState, request: PromptRequest, error: Exception) -> None:
        """A request came to nothing: it is queued again, and its engine looked at."""
        self._queue_again(request)
        if engine.version is None:
            return  # it is being seen to already
        try:
            await engine.handle.health(deadline_s=HEALTH_S)
        except (EngineError, WorkerError, DeadlineError):
            if not engine.rests:  # else that is seen to when it is woken: its GPU is the trainer's
                self.take_down(engine, error)
            return
        self.restarts.note_request(request, error)

    def _queue_again(self, request: PromptRequest) -> None:
        """Groups go on from what there is of them, if there is something and the manager lets them."""
        if request.answer is not None:
            self._asked.appendleft(request)
            return
        for number in (number for number in request.numbers if number is not None):
            if self.partial.goes_on(number):
                self.manager.suspend([number])
            else:
                self.partial.throw_away(number)
                self.manager.requeue([number])

    async def vacate(self, engines: Sequence[EngineState]) -> None:
        """In the loop: keep requests from these engines; what they work on goes on elsewhere. Waits for those that restart."""
        for engine in engines:
            self._shut(engine)
        await self._suspend(engines)
        for engine in engines:
            self._interrupt(engine, list(engine.requests))
        await asyncio.gather(*self._ending.values())
        while under_way := [engine.restarting for engine in engines if engine.restarting is not None]:
            await asyncio.wait(under_way)
        for engine in engines:
            engine.version, engine.rests = None, True
        self.dispatch()

    async def work_for(self, version: int) -> int:
        """In the loop: groups and asked requests that a further engine with weights of `version` could start now."""
        while self._goes_on:
            await asyncio.sleep(0)
        return len(self._asked) + self.manager.startable(version)

    async def _suspend(self, engines: Sequence[EngineState]) -> None:
        """Put the groups that are under way there back into the queue, and have the engines stop working on them."""
        of_groups = [(engine, task, r) for engine in engines for task, r in engine.requests.items() if r.answer is None]
        if self.cuts:
            await cut_short([request.asked for *_, request in of_groups if request.asked is not None], CUT_S)
        for engine, task, _ in of_groups:
            if task in engine.requests:
                self._interrupt(engine, [task])

    def _interrupt(self, engine: EngineState, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
            request = self.order.drop(engine, task)
            assert request is not None, "only what it works on is interrupted"
            self._queue_again(request)

    def take_down(self, engine: EngineState, error: Exception) -> None:
        """The engine failed: whatever it was working on is queued again, and it is started anew if it is not well."""
        if not engine.fell_behind:  # one death may be noticed by several requests and an update
            self.restarts.note(engine, error)
        engine.version, engine.error, engine.fell_behind = None, error, True
        self._shut(engine)
        self._interrupt(engine, list(engine.requests))
        self.restarts.start(engine)
        self.dispatch()

    def _discard(self, numbers: Sequence[int]) -> None:
        """These groups are queued again; what there is of their responses is thrown away."""
        for number in numbers:
            self._groups.pop(number, None)
            self.partial.throw_away(number)
        self._forget(numbers)
        self.dispatch()

    def _forget(self, numbers: Sequence[int]) -> None:
        gone = set(numbers)
        for engine in self.engines:
            for task, request in list(engine.requests.items()):
                if gone & set(request.numbers):
                    request.numbers = [None if number in gone else number for number in request.numbers]
                    if set(request.numbers) == {None}:
                        self.order.drop(engine, task)
                        self._ending[task] = self._loop.create_task(self._end(task, request))

    async def _end(self, task: asyncio.Task[None], request: PromptRequest) -> None:
        """Stop the work on a request that nobody wants any more, and count what there is of it."""
        try:
            if self.cuts and request.asked is not None:
                await cut_short([request.asked], CUT_S)
            self.partial.aborted_tokens += sum(group.empty() for group in request.partial or ())
        finally:
            task.cancel()
            del self._ending[task]

    def give_up(self, error: BaseException) -> None:
        self._error = self._error or error
        self.changed.set()

    async def _stop(self) -> None:
        for engine in self.engines:
            self._shut(engine)  # whatever ends now must start nothing else
        tasks = [task for engine in self.engines for task in engine.requests] + [*chain(*self._ending.items())]
        tasks += [task for engine in self.engines for task in (engine.restarting, engine.watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
