"""One rollout engine as a Ray actor: the engine's own protocol, callable by the driver and by the training ranks."""

from __future__ import annotations

from typing import Any

import ray

from megarl.rollout import build_engine


@ray.remote(max_concurrency=16)
class EngineActor:
    """Holds an engine; every protocol method is forwarded by name, so errors reach the caller as the engine raised them."""

    def __init__(self, kind: str, options: Any) -> None:
        self.engine = build_engine(kind, options)

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `engine.method(*arguments, **keywords)`."""
        return await getattr(self.engine, method)(*arguments, **keywords)

    async def version(self) -> int:
        """Version of the weights that the engine serves."""
        return self.engine.version

    async def stop(self) -> None:
        """End the engine and its processes."""
        await self.engine.stop()
