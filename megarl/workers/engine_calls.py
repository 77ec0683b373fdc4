"""Calls to an engine's actor from an asyncio loop: each has a deadline, and is stopped at the engine when it is cancelled."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray

from megarl.errors import DeadlineError, MegarlError, WorkerError

ACTOR_POLL_S = 0.5
ANSWER_S = 15.0
"""For an engine's process to answer what needs no work."""


class EngineCalls:
    """One engine actor as the rollout scheduler calls it (`rollout.engine_slot.EngineClient`)."""

    def __init__(self, actor: Any, number: int) -> None:
        self.actor, self.number = actor, number

    async def call(self, method: str, *arguments: Any, deadline_s: float, **keywords: Any) -> Any:
        """`engine.method(*arguments, **keywords)`. `generate` is told its deadline; others are only waited for.

        Raises:
            MegarlError: what the engine raised, as it raised it.
            WorkerError: its process is gone.
            DeadlineError: no answer after `deadline_s` seconds.
        """
        if method == "generate":
            keywords["deadline_s"] = deadline_s
        return await self._answer(self.actor.call.remote(method, *arguments, **keywords), method, deadline_s + 5)

    async def restart(self, deadline_s: float) -> None:
        """Start the engine anew, without weights: in its process or, if that is gone, in the one that Ray makes instead.

        A process that is stopped, or too stuck to answer anything, is ended first. Raises as `call` does.
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

    async def endpoint(self, deadline_s: float) -> Any:
        """Where senders reach the engine; None: through its actor."""
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
