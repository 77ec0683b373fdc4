"""One engine as the scheduler sees it: how it is reached, which weights it has, and what it works on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.data.media import Media
from megarl.data.sample import Prompt, Sample
from megarl.errors import DeadlineError
from megarl.observe.trace import BusySpans
from megarl.rollout.engines.protocol import Generation, SamplingParams


class EngineHandle(Protocol):
    """One engine, wherever it runs: the methods of `Engine`, each with a deadline. Cancelling a call stops the work on it.

    Every method raises what the engine raised, WorkerError if its process is gone, or DeadlineError.
    """

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int,
        keys: Sequence[str],
        deadline_s: float,
        media: Sequence[Sequence[Media]] | None = None,
    ) -> list[list[Generation]]: ...

    async def health(self, *, deadline_s: float) -> None: ...

    async def begin_update(self, version: int, base: int | None, *, deadline_s: float) -> None: ...

    async def load_update(self, folder: str, *, deadline_s: float) -> None: ...

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None, *, deadline_s: float) -> None: ...

    async def abandon_update(self, *, deadline_s: float) -> None: ...

    async def sleep(self, *, deadline_s: float) -> None: ...

    async def wake(self, *, deadline_s: float) -> None: ...

    async def restart(self, deadline_s: float) -> None:
        """Start the engine anew, without weights."""
        ...


GenerateGroups = Callable[["EngineState", Sequence[Prompt]], Awaitable[list[list[Sample]]]]
"""Answers prompts on one engine: a group of samples for each."""
PendingResult = asyncio.Future[list[list[Sample]]]


@dataclass
class EngineState:
    """One engine as the scheduler sees it. It serves while `version` is that of its weights (None: of no known version)."""

    number: int
    handle: EngineHandle
    version: int | None = None
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while requests may reach the engine: not during a weight update."""
    requests: dict[asyncio.Task[None], PromptRequest] = field(default_factory=dict)
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

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int,
        keys: Sequence[str],
        deadline_s: float,
        media: Sequence[Sequence[Media]],
    ) -> list[list[Generation]]:
        """`Engine.generate`, once no update keeps requests out."""
        try:
            async with asyncio.timeout(deadline_s):  # unlike wait_for in Python 3.11 it never swallows a cancellation
                await self.is_open.wait()
        except TimeoutError:
            raise DeadlineError(f"engine {self.number} was not open for requests again within {deadline_s:.0f} s") from None
        with self.busy:
            if not any(media):  # engines that do not see need not know of pictures
                return await self.handle.generate(prompts, params, n=n, keys=keys, deadline_s=deadline_s)
            return await self.handle.generate(prompts, params, n=n, keys=keys, deadline_s=deadline_s, media=media)


@dataclass(eq=False)
class PromptRequest:
    """Prompts that go to one engine together, and whose groups they are, by number (None: no longer wanted)."""

    prompts: list[Prompt]
    generate_groups: GenerateGroups
    load: int
    """As how many groups it counts."""
    numbers: list[int | None] = field(default_factory=list)
    answer: PendingResult | None = None
    """Who asked for it, where it is no group's."""
    failures: int = 0
