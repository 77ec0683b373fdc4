"""One engine as the scheduler sees it: how it is reached, which weights it has, and what it works on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.data.sample import Prompt, Sample
from megarl.errors import DeadlineError
from megarl.observe.trace import BusySpans


class EngineClient(Protocol):
    """One engine, wherever it runs. Cancelling a call stops the engine's work on it."""

    async def call(self, method: str, *arguments: Any, deadline_s: float, **keywords: Any) -> Any:
        """`engine.method(*arguments, **keywords)`; raises what the engine raised, or WorkerError if its process is gone."""
        ...

    async def restart(self, deadline_s: float) -> None:
        """Start the engine anew, without weights."""
        ...


Respond = Callable[["Slot", Sequence[Prompt]], Awaitable[list[list[Sample]]]]
"""Answers prompts on one engine: a group of samples for each."""
Answer = asyncio.Future[list[list[Sample]]]


@dataclass
class Slot:
    """One engine as the scheduler sees it. It serves while `version` is that of its weights (None: of no known version)."""

    number: int
    client: EngineClient
    version: int | None = None
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while requests may reach the engine: not during a weight update."""
    requests: dict[asyncio.Task[None], Request] = field(default_factory=dict)
    failures: int = 0
    error: Exception | None = None
    """Why it failed last."""
    restarting: asyncio.Task[None] | None = None
    fell_behind: bool = False
    """It failed since the update began that is under way, and so cannot have what that update gave it."""

    busy: BusySpans = field(default_factory=lambda: BusySpans("generate"))
    """When it was answering requests."""

    @property
    def load(self) -> int:
        """Groups that the engine works on."""
        return sum(request.load for request in self.requests.values())

    async def generate(self, *arguments: Any, deadline_s: float, **keywords: Any) -> Any:
        """`engine.generate`, once no update keeps requests out."""
        try:
            async with asyncio.timeout(deadline_s):  # unlike wait_for in Python 3.11 it never swallows a cancellation
                await self.is_open.wait()
        except TimeoutError:
            raise DeadlineError(f"engine {self.number} was not open for requests again within {deadline_s:.0f} s") from None
        with self.busy:
            return await self.client.call("generate", *arguments, deadline_s=deadline_s, **keywords)


@dataclass(eq=False)
class Request:
    """Prompts that go to one engine together, and whose tickets they are (None: no longer wanted)."""

    prompts: list[Prompt]
    respond: Respond
    load: int
    """As how many groups it counts."""
    tickets: list[int | None] = field(default_factory=list)
    answer: Answer | None = None
    """Who asked for it, where it is no ticket's."""
    failures: int = 0
