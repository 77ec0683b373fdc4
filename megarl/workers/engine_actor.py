"""One rollout engine as a Ray actor, callable by the driver and by the training ranks through `engine_calls`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from itertools import count
from typing import Any

import ray

from megarl.data.stop_finder import ModelTexts
from megarl.data.stored import Held, ResponseTokens, StoredGeneration, common_beginnings, version_runs
from megarl.errors import EngineError, MegarlError
from megarl.models.registry import use_architecture
from megarl.rollout.engines.protocol import Engine, EngineProcess, EngineRequest, Generation
from megarl.rollout.engines.registry import load_engine
from megarl.rollout.engines.stops import ended_at_stops
from megarl.rollout.engines.stored_turns import with_tokens
from megarl.system.process_exit import end_with_parent
from megarl.system.user_code import describe
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.sglang_senders import ServerEndpoint

STOP_S = 30.0


def _listen_on_node() -> None:
    """Have this process's servers listen on the node's address, which a job script may have set already."""
    os.environ.setdefault("MEGARL_NODE_ADDRESS", ray.util.get_node_ip_address())


@ray.remote(max_concurrency=8, max_restarts=-1)
class EngineNodeActor:
    """Holds what belongs to an engine on one of its further nodes. If this process dies, Ray makes it anew, without it."""

    def __init__(self, path: str, architecture: str | None = None, *, reachable: bool = False) -> None:
        """Make the actor as `EngineActor` does."""
        end_with_parent()
        use_architecture(architecture)
        if reachable:
            _listen_on_node()
        self.path = path
        self.process: EngineProcess | None = None

    def start(self, options: Any) -> None:
        """Start it in place of what is left from before."""
        self.stop()
        self.process = load_engine(self.path).start_on_node(options)

    def wait(self) -> str:
        """Wait until it has ended; returns what is known of its end."""
        process = self.process
        return process.wait() if process is not None else "it was not started"

    def stop(self) -> None:
        """End it."""
        process, self.process = self.process, None
        if process is not None:
            process.stop()


class RemoteNode:
    """An `EngineNodeActor` as an engine calls it (`rollout.engines.sglang.server.OtherNode`), from any thread."""

    def __init__(self, name: str) -> None:
        self.actor = ray.get_actor(name)

    def start(self, options: Any) -> None:
        """See `EngineNodeActor.start`; raises EngineError if the node is gone."""
        try:
            ray.get(self.actor.start.remote(options))
        except ray.exceptions.RayError as error:
            raise EngineError(f"a further node of the engine did not start its process: {error}") from error

    def wait(self) -> str:
        """See `EngineNodeActor.wait`."""
        try:
            return str(ray.get(self.actor.wait.remote()))
        except ray.exceptions.RayError as error:
            return f"the process that held it is gone ({error})"

    def stop(self) -> None:
        """See `EngineNodeActor.stop`."""
        with contextlib.suppress(ray.exceptions.RayError):  # where the node is gone, so is what ran there
            ray.get(self.actor.stop.remote(), timeout=STOP_S)


@ray.remote(max_concurrency=1000, max_restarts=-1)
class EngineActor:
    """Holds an engine; its methods are forwarded by name, so errors reach the caller as the engine raised them.

    If this process dies, Ray makes it anew under the same handle, without an engine: `restart` gives it one.
    """

    def __init__(
        self,
        path: str,
        model_path: str,
        options: dict[str, Any],
        architecture: str | None = None,
        nodes: Sequence[str] = (),
        *,
        reachable: bool = False,
    ) -> None:
        """`path` is the import path of the engine's class, `options` what its method of that name gave,
        `architecture` that of the user's own model family, `nodes` the names of the `EngineNodeActor`s on its further nodes.
        `reachable`: other machines must reach what the engine listens on."""
        end_with_parent()
        use_architecture(architecture)
        if reachable:
            _listen_on_node()
        self.path, self.model_path, self.options, self._texts = path, model_path, options, ModelTexts(model_path)
        if nodes:
            self.options = {**options, "nodes": [RemoteNode(name) for name in nodes]}
        self.engine: Engine | None = None
        self._starting = asyncio.Lock()

    async def start(self, initial_version: int | None) -> None:
        """Start the engine; `initial_version` is that of the weights in the model folder (None: others will be sent).

        A start that was cancelled is waited for: it ends what it has begun.
        """
        kind = load_engine(self.path)
        try:
            async with self._starting:
                self.engine = await kind.start(self.model_path, initial_version=initial_version, **self.options)
        except MegarlError:
            raise
        except Exception as cause:  # whatever a class of the user's own may raise
            raise EngineError(f"{self.path} did not start: {describe(cause)}") from cause

    async def restart(self) -> None:
        """Start the engine anew, whatever became of it; it has no weights of a known version until a complete update."""
        await self.stop()
        await self.start(None)

    async def endpoint(self) -> ServerEndpoint | None:
        """The server at which senders reach the engine directly; None: through this actor, also where it has no engine
        (any more)."""
        return self.engine.endpoint if self.engine is not None else None

    async def model(self) -> ServedModel | None:
        """The model that the engine serves; None: any weights are the right ones."""
        return self._there().served_model

    async def answer(self, request: EngineRequest) -> tuple[list[list[StoredGeneration]], ResponseTokens, list[str]]:
        """`Engine.generate` with tokens and texts apart: these two values stay in this node's object store, and the first one's
        handles, which are empty, are to be those to them."""
        generations = await self.generate(await asyncio.to_thread(with_tokens, request))
        return await asyncio.to_thread(kept_apart, request.prompts, generations, self._texts)

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        """`Engine.generate`; what an engine sampled behind a stop text, because it knows no text, is left out."""
        generations = await self._there().generate(request)
        if not request.params.looked_for:
            return generations
        return await asyncio.to_thread(ended_at_stops, request.prompts, generations, request.params, self._texts)

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `engine.method(*arguments, **keywords)`."""
        return await getattr(self._there(), method)(*arguments, **keywords)

    async def stop(self) -> None:
        """End the engine and its processes."""
        if self.engine is not None:
            await asyncio.shield(self.engine.stop())

    def _there(self) -> Engine:
        if self.engine is None:
            raise EngineError("the engine is gone with the process that held it; restart it and send it weights")
        return self.engine


def kept_apart(
    prompts: Sequence[Sequence[int]], generations: Sequence[Sequence[Generation]], model: ModelTexts
) -> tuple[list[list[StoredGeneration]], ResponseTokens, list[str]]:
    """Responses `[prompt][sample]` to `prompts` without tokens and texts, whose handles are empty, and these."""
    flat = [generation for of_prompt in generations for generation in of_prompt]
    tokens = ResponseTokens.of(
        prompts,
        [number for number, of_prompt in enumerate(generations) for _ in of_prompt],
        [generation.response_ids for generation in flat],
        [generation.log_probs for generation in flat],
        [generation.weight_versions for generation in flat],
    )
    nowhere, places = Held(None), count()
    summaries = []
    for of_prompt in generations:
        common = common_beginnings([generation.response_ids for generation in of_prompt])
        summaries.append(
            [
                StoredGeneration(
                    nowhere,
                    nowhere,
                    next(places),
                    generation.tokens,
                    version_runs(generation.weight_versions),
                    generation.finish_reason,
                    generation.extra,
                    generation.prefill,
                    common,
                    member,
                )
                for member, generation in enumerate(of_prompt)
            ]
        )
    tokenizer = model.tokenizer
    texts = [str(tokenizer.decode(generation.response_ids, skip_special_tokens=True)) for generation in flat]
    return summaries, tokens, texts
