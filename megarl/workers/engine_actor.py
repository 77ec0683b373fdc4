"""One rollout engine as a Ray actor: the engine's own protocol, callable by the driver and by the training ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from megarl.errors import EngineError
from megarl.models.registry import load_hf_config
from megarl.rollout.build import build_engine
from megarl.rollout.same_model import ModelFacts
from megarl.rollout.sglang_engine import SglangEngine
from megarl.rollout.sglang_senders import Endpoint
from megarl.workers.fate import end_with_parent


@ray.remote(max_concurrency=1000, max_restarts=-1)
class EngineActor:
    """Holds an engine; every protocol method is forwarded by name, so errors reach the caller as the engine raised them.

    If this process dies, Ray makes it anew under the same handle, without an engine: `restart` gives it one.
    """

    def __init__(self, kind: str, model_path: str, options: dict[str, Any]) -> None:
        end_with_parent()
        self.kind, self.model_path, self.options = kind, model_path, options
        self.engine: Any = None

    async def start(self) -> None:
        """Start the engine; its weights, those of the model folder, are version 0."""
        self.engine = await build_engine(self.kind, self.model_path, self.options)

    async def restart(self) -> None:
        """Start the engine anew, whatever became of it; it has no weights of a known version until a complete update."""
        if isinstance(self.engine, SglangEngine):
            await self.engine.restart()
        else:
            await self.stop()
            self.engine = await build_engine(self.kind, self.model_path, self.options | {"initial_version": None})

    async def endpoint(self) -> Endpoint | None:
        """Where senders reach the engine directly; None: through this actor."""
        return self.engine.endpoint if isinstance(self.engine, SglangEngine) else None

    async def model(self) -> ModelFacts | None:
        """Which model the engine serves; None: it only replays."""
        if self.kind == "replay":
            return None
        return ModelFacts(load_hf_config(self.model_path), self.options.get("dtype", "float32"))

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `engine.method(*arguments, **keywords)`."""
        if self.engine is None:
            raise EngineError("the engine is gone with the process that held it; restart it and send it weights")
        return await getattr(self.engine, method)(*arguments, **keywords)

    async def stop(self) -> None:
        """End the engine and its processes."""
        if self.engine is not None:
            await asyncio.shield(self.engine.stop())
