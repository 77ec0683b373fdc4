"""The engine that is sent work next: what each works on, what it can hold, and the order of those that have room.

An event costs O(log engines): loads are counted as they change, and the order is kept in heaps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace

from megarl.data.sample import Prompt
from megarl.errors import DeadlineError, EngineError, WorkerError
from megarl.rollout.engines.capacity import EngineCapacity
from megarl.rollout.engines.protocol import EngineRequest
from megarl.rollout.engines.stored_turns import SampledTurn
from megarl.rollout.scheduling.engine_state import AskedGroups, EngineState, PromptRequest, prompt_key

CLUTTER = 4
"""Entries per engine, most of which no longer hold, that a heap may have before it is made anew."""
REPORT_S = 600.0
"""For an engine to say that responses have ended, after which it is asked again."""
REPORTS_PER_S = 100.0
"""Times in a second that engines, all together, say so: a call to one costs the driver about 0.3 ms."""
LENGTHS = 512
"""Responses, the last ones, that the mean length is of."""
CALLS_PER_ENGINE = 512
"""Requests that an engine is sent at once, at most."""
CAPACITY_S = 20.0
"""For an engine to say what it holds; one that does not is sent work as if it held everything."""


class EngineOrder:
    """The engines that have room, the least loaded first, then by number.

    An engine is sent no more responses than `groups_per_engine` groups have and than it samples side by side, and no more
    tokens than its cache has room for: a group's prompt counts once, and each response that has not ended as many tokens as the
    last ones had on average (none before there is one). What is too much after all waits at the engine.
    """

    def __init__(
        self,
        engines: Sequence[EngineState],
        has_more_room: Callable[[], None],
        groups_per_engine: int,
        samples_per_group: int,
        *,
        reports: bool,
    ) -> None:
        """`has_more_room` is called when a response has ended whose group goes on. `reports`: engines say when
        (`Engine.take_ended`); else a group holds the room of all of its responses until the last one ends, unless they are
        episodes."""
        self._engines, self._has_more_room = engines, has_more_room
        self._most, self._samples, self._reports = groups_per_engine * samples_per_group, samples_per_group, reports
        self._lengths, self._mean_length = 0, 0.0  # of responses
        self._heaps: dict[int, list[tuple[int, int, int]]] = {}  # (load, number, version) by version
        self._listed: dict[int, tuple[int, int, int]] = {}  # the same by number: other entries no longer hold
        self._changed: dict[int, EngineState] = {}  # by number: listed as they were before
        self._keyed: dict[str, tuple[EngineState, asyncio.Task[None]]] = {}  # who works on the group of a key

    # who is next --------------------------------------------------------------------------------------------------

    def first(self, newer_than: int = -1) -> EngineState | None:
        """The engine that is next among those with weights of later versions than this one; None: there is none."""
        for engine in self._changed.values():
            self._list(engine)
        self._changed.clear()
        first: tuple[int, int, int] | None = None
        for version in [*self._heaps]:
            if version > newer_than and (top := self._top(version)) is not None and (first is None or top < first):
                first = top
        return self._engines[first[1]] if first is not None else None

    def changed(self, engine: EngineState) -> None:
        """Take in that an engine was opened or shut, or has other work, another capacity or other weights."""
        self._changed[engine.number] = engine
        if engine.version is None and engine.watch is not None:
            engine.watch.cancel()  # what comes back in its place may not know of it

    def _list(self, engine: EngineState) -> None:
        number, version = engine.number, engine.version
        if version is None or not engine.is_open.is_set() or not self._has_room(engine):
            self._listed.pop(number, None)
            return
        entry = engine.load, number, version
        if self._listed.get(number) == entry:
            return
        self._listed[number] = entry
        heap = self._heaps.get(version)
        if heap is None:
            self._heaps[version] = [entry]
        elif heap[0][1] == number:
            heapreplace(heap, entry)
        else:
            heappush(heap, entry)
            if len(heap) > CLUTTER * len(self._engines):
                self._heaps[version] = _in_order(self._listed.values(), version)

    def _top(self, version: int) -> tuple[int, int, int] | None:
        heap = self._heaps[version]
        while heap:
            top = heap[0]
            if self._listed.get(top[1]) == top:
                return top
            heappop(heap)
        del self._heaps[version]
        return None

    def _has_room(self, engine: EngineState) -> bool:
        if not engine.requests:
            return engine.capacity.responses != 0
        if len(engine.requests) >= CALLS_PER_ENGINE or engine.asked >= self._most:
            return False
        most, tokens = engine.capacity.responses, engine.capacity.tokens
        return (most is None or engine.load < most) and (
            tokens is None or engine.prompt_tokens + engine.load * self._mean_length < tokens
        )

    def room(self, engine: EngineState) -> int:
        """Groups that may be sent beside the requests that the engine works on, whatever it says of its own room."""
        return -(-(self._most - engine.asked) // self._samples) if len(engine.requests) < CALLS_PER_ENGINE else 0

    # what they work on --------------------------------------------------------------------------------------------

    def take(self, engine: EngineState, task: asyncio.Task[None], request: PromptRequest) -> AskedGroups:
        """Count in a request that `task` is to ask of an engine, and return how."""
        engine.requests[task] = request
        request.left = request.responses = len(request.prompts) * (request.n or self._samples)
        request.prompt_tokens = sum([len(prompt.prompt_ids) for prompt in request.prompts])
        engine.load += request.left
        engine.asked += request.responses
        engine.groups += request.groups
        engine.prompt_tokens += request.prompt_tokens
        request.asked = asked = AskedGroups(engine, request.prompts, request.partial)
        if request.left > 1:
            asked.count_ended = partial(self._end_some, engine, task)
        if engine.capacity.tokens is not None:
            asked.observe = self._observe
        if self._reports:
            self._keyed |= dict.fromkeys(map(prompt_key, request.prompts), (engine, task))
        self.changed(engine)
        return asked

    def drop(self, engine: EngineState, task: asyncio.Task[None]) -> PromptRequest | None:
        """Count out a request that is done, or that nobody wants any more; None: that was done before."""
        request = engine.requests.pop(task, None)
        if request is None:
            return None
        engine.load -= request.left
        engine.asked -= request.responses
        engine.groups -= request.groups
        engine.prompt_tokens -= request.prompt_tokens
        for key in map(prompt_key, request.prompts) if self._reports else ():
            if self._keyed.get(key) == (engine, task):
                del self._keyed[key]
        self.changed(engine)
        return request

    def _end_some(self, engine: EngineState, task: asyncio.Task[None], responses: int) -> None:
        request = engine.requests.get(task)
        if request is not None and responses:
            ended = min(responses, request.left)
            request.left -= ended
            engine.load -= ended
            self.changed(engine)
            self._has_more_room()

    def _observe(self, prompts: Sequence[Prompt], request: EngineRequest, answers: Sequence[Sequence[SampledTurn]]) -> None:
        for prompt, ids, of_prompt in zip(prompts, request.prompts, answers, strict=True):
            for answer in of_prompt:
                behind_prompt = len(ids) - len(prompt.prompt_ids) + answer.tokens
                self._lengths = min(LENGTHS, self._lengths + 1)
                self._mean_length += (behind_prompt - self._mean_length) / self._lengths

    async def ask_capacities(self) -> None:
        """Have every engine that `reports` say what it holds at once."""
        engines = self._engines if self._reports else ()
        answers = await asyncio.gather(
            *(engine.handle.capacity(deadline_s=CAPACITY_S) for engine in engines), return_exceptions=True
        )
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, EngineCapacity):
                engine.capacity = answer
                self.changed(engine)

    def watch(self, engine: EngineState) -> None:
        """In the loop: from now on have an engine that `reports` say which responses have ended."""
        if self._reports and engine.watch is None:
            engine.watch = asyncio.get_running_loop().create_task(self._watch(engine))

    async def _watch(self, engine: EngineState) -> None:
        try:
            while True:
                with contextlib.suppress(DeadlineError):
                    for key in await engine.handle.take_ended(deadline_s=REPORT_S):
                        of_key = self._keyed.get(key)
                        if of_key is not None and of_key[0] is engine:  # else its group has gone to another one meanwhile
                            self._end_some(*of_key, 1)
                await asyncio.sleep(len(self._engines) / REPORTS_PER_S)
        except (EngineError, WorkerError):
            pass  # whoever waits for its answers sees to it
        finally:
            engine.watch = None


def _in_order(entries: Iterable[tuple[int, int, int]], version: int) -> list[tuple[int, int, int]]:
    heap = [entry for entry in entries if entry[2] == version]
    heapify(heap)
    return heap
