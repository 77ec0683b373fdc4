"""Statements of an engine about its room: how much it holds at once, and which responses have ended of requests that go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCapacity:
    """Most that an engine holds at once; None: it does not say."""

    responses: int | None = None
    """Responses that it samples side by side. 0: it is sent no requests."""
    tokens: int | None = None
    """Tokens whose keys and values its cache keeps."""


UNKNOWN = EngineCapacity()


class EndedResponses:
    """Counts of responses that have ended by the keys of their prompts, until somebody takes them; used in one event loop."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        self._more: asyncio.Event | None = None

    def note(self, key: str) -> None:
        """A response to this prompt has ended, and others of the request go on."""
        self._ended[key] += 1
        if self._more is not None:
            self._more.set()

    def forget(self, keys: Iterable[str]) -> None:
        """The requests with these prompts are done: nobody has to be told any more."""
        for key in keys:
            self._ended.pop(key, None)

    async def take(self) -> list[str]:
        """Wait until there is one, and return the keys of all, one for each response."""
        while not self._ended:
            self._more = asyncio.Event()
            await self._more.wait()
        keys = [*self._ended.elements()]
        self._ended.clear()
        return keys
