"""Calls to an engine's actor from an asyncio loop: each has a deadline, and is stopped at the engine when it is cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec

import ray

from megarl.data.stored import StoredGeneration
from megarl.errors import DeadlineError, MegarlError, WorkerError
from megarl.rollout.engines.capacity import EngineCapacity
from megarl.rollout.engines.protocol import Engine, EngineRequest
from megarl.rollout.engines.stored_turns import SampledTurn
from megarl.weights.digests import SentDigests
from megarl.workers.object_store import RayObject

P = ParamSpec("P")

ACTOR_POLL_S = 0.5
ANSWER_S = 15.0
"""For an engine's process to answer what needs no work."""
GRACE_S = 5.0
"""For the engine's own sentence about a deadline to come first."""


def is_lost(reference: Any) -> bool:
    """Return whether a call has failed because its actor's process ended."""
    done, _ = ray.wait([reference], timeout=0)
    try:
        ray.get(done)
    except ray.exceptions.RayError as error:
        return isinstance(error, (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError))
    return False


def wait_for_actor(engine: Any, ends_at: float) -> None:
    """Wait while Ray makes an engine's actor anew, when calls fail; until `ends_at` (in `time.monotonic()`) at most."""
    while time.monotonic() < ends_at:
        try:
            ray.get(engine.endpoint.remote(), timeout=max(0.0, ends_at - time.monotonic()))
            return
        except ray.exceptions.ActorUnavailableError:
            time.sleep(ACTOR_POLL_S)
        except ray.exceptions.RayError:  # the next call says what is wrong
            return


def submit(
    actor: Any, method: Callable[Concatenate[Engine, P], Awaitable[object]], *arguments: P.args, **keywords: P.kwargs
) -> Any:
    """Start `method` of the engine that `actor` holds; Ray's reference to what it will answer."""
    return actor.call.remote(method.__name__, *arguments, **keywords)


class EngineCalls:
    """One engine actor as the rollout scheduler calls it (`rollout.scheduling.engine_handle.EngineHandle`).

    Every method but `restart` and `end` is the engine's own, waited for `deadline_s` seconds.

    Raises:
        MegarlError: what the engine raised, as it raised it.
        WorkerError: its process is gone.
        DeadlineError: no answer after `deadline_s` seconds.
    """

    def __init__(self, actor: Any, number: int) -> None:
        self.actor, self.number = actor, number

    async def generate(self, request: EngineRequest) -> list[list[SampledTurn]]:
        """The engine knows its deadline, too, and is given a moment to say itself that it has passed."""
        deadline_s = request.deadline_s + GRACE_S
        if not request.stored:
            return await self._answer(self.actor.generate.remote(request), "generate", deadline_s)
        summaries, tokens, texts = self.actor.answer.options(num_returns=3).remote(request)
        answers: list[list[StoredGeneration]] = await self._answer(summaries, "generate", deadline_s)
        stored, said = RayObject(tokens), RayObject(texts)
        return [[replace(summary, stored=stored, texts=said) for summary in of_prompt] for of_prompt in answers]

    async def cut(self, keys: Sequence[str], *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.cut, keys), "cut", deadline_s + GRACE_S)

    async def end_conversations(self, names: Sequence[str], *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.end_conversations, names), "end_conversations", deadline_s + GRACE_S)

    async def capacity(self, *, deadline_s: float) -> EngineCapacity:
        capacity: EngineCapacity = await self._answer(submit(self.actor, Engine.capacity), "capacity", deadline_s + GRACE_S)
        return capacity

    async def take_ended(self, *, deadline_s: float) -> list[str]:
        ended: list[str] = await self._answer(submit(self.actor, Engine.take_ended), "take_ended", deadline_s)
        return ended

    async def health(self, *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.health), "health", deadline_s + GRACE_S)

    async def begin_update(self, version: int, base: int | None, *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.begin_update, version, base), "begin_update", deadline_s + GRACE_S)

    async def load_update(self, folder: str, *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.load_update, folder), "load_update", deadline_s + GRACE_S)

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None, *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.end_update, version, checksums), "end_update", deadline_s + GRACE_S)

    async def end_update_by_sums(self, version: int, sent: SentDigests, *, deadline_s: float) -> Sequence[int]:
        reference = submit(self.actor, Engine.end_update_by_sums, version, sent)
        doubtful: Sequence[int] = await self._answer(reference, "end_update", deadline_s + GRACE_S)
        return doubtful

    async def abandon_update(self, *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.abandon_update), "abandon_update", deadline_s + GRACE_S)

    async def sleep(self, *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.sleep), "sleep", deadline_s + GRACE_S)

    async def wake(self, *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.wake), "wake", deadline_s + GRACE_S)

    async def wake_cache(self, *, deadline_s: float) -> None:
        await self._answer(submit(self.actor, Engine.wake_cache), "wake_cache", deadline_s + GRACE_S)

    async def restart(self, deadline_s: float) -> None:
        """Start the engine anew, without weights: in its process or, if that is gone, in the one that Ray makes instead.

        A process that is stopped, or too stuck to answer anything, is ended first. Raises as the class says.
        """
        ends_at = time.monotonic() + deadline_s
        try:
            await self.endpoint(min(ANSWER_S, deadline_s))
        except DeadlineError:
            ray.kill(self.actor, no_restart=False)
        except WorkerError:
            pass  # gone already
        while True:
            try:
                await self._answer(self.actor.restart.remote(), "restart", ends_at - time.monotonic())
                return
            except WorkerError as error:
                if not isinstance(error.__cause__, ray.exceptions.ActorUnavailableError) or time.monotonic() > ends_at:
                    raise
            await asyncio.sleep(ACTOR_POLL_S)

    async def end(self) -> None:
        """End the engine's process, whatever it is doing; Ray makes another, which has no engine until `restart`."""
        ray.kill(self.actor, no_restart=False)

    async def endpoint(self, deadline_s: float) -> Any:
        """The server at which senders reach the engine; None: through its actor."""
        return await self._answer(self.actor.endpoint.remote(), "endpoint", deadline_s)

    async def _answer(self, reference: Any, method: str, deadline_s: float) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(reference.future())
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except TimeoutError:
            ray.cancel(reference)
            late = DeadlineError(f"engine {self.number} did not answer '{method}' within {deadline_s:.0f} s")
            late.who = f"engine {self.number}"
            raise late from None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, MegarlError):
                raise cause from None
            ours = WorkerError(f"engine {self.number} failed in '{method}': {error}")
            ours.who = f"engine {self.number}"
            raise ours from error
