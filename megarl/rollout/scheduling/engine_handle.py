"""The way in which the scheduler reaches an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megarl.rollout.engines.capacity import EngineCapacity
from megarl.rollout.engines.protocol import EngineRequest
from megarl.rollout.engines.stored_turns import SampledTurn
from megarl.weights.digests import SentDigests


class EngineHandle(Protocol):
    """One engine, wherever it runs: the methods of `Engine`, each with a deadline. Cancelling a call stops the work on it.

    Every method raises what the engine raised, WorkerError if its process is gone, or DeadlineError.
    """

    async def generate(self, request: EngineRequest) -> list[list[SampledTurn]]: ...

    async def cut(self, keys: Sequence[str], *, deadline_s: float) -> None: ...

    async def end_conversations(self, names: Sequence[str], *, deadline_s: float) -> None: ...

    async def capacity(self, *, deadline_s: float) -> EngineCapacity: ...

    async def take_ended(self, *, deadline_s: float) -> list[str]: ...

    async def health(self, *, deadline_s: float) -> None: ...

    async def begin_update(self, version: int, base: int | None, *, deadline_s: float) -> None: ...

    async def load_update(self, folder: str, *, deadline_s: float) -> None: ...

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None, *, deadline_s: float) -> None: ...

    async def end_update_by_sums(self, version: int, sent: SentDigests, *, deadline_s: float) -> Sequence[int]: ...

    async def abandon_update(self, *, deadline_s: float) -> None: ...

    async def sleep(self, *, deadline_s: float) -> None: ...

    async def wake(self, *, deadline_s: float) -> None: ...

    async def wake_cache(self, *, deadline_s: float) -> None: ...

    async def restart(self, deadline_s: float) -> None:
        """Start the engine anew, without weights."""
        ...

    async def end(self) -> None:
        """End the engine's process and all that it holds, whatever it is doing; `restart` makes it anew. Raises nothing."""
        ...
