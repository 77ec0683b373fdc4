"""The newest weights for an engine that comes, from one that has them: Ray carries them from node to node, past the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

import ray

from megarl.errors import DeadlineError, MegarlError, WorkerError
from megarl.rollout.engines.protocol import Engine
from megarl.rollout.scheduling.engine_state import EngineState
from megarl.workers.engine_calls import submit
from megarl.workers.rollouts import Rollouts

POLL_S = 0.05
"""Between two looks whether an update has ended."""


def newest_weights(rollouts: Rollouts, actor: Any, closing: Callable[[], bool]) -> tuple[int | None, int | None]:
    """Give the engine that `actor` holds the newest weights: their version, and the number of the engine that gave them.

    None, None: no engine could give any, and it has none. Waits while the ranks send engines newer ones. An engine goes on
    sampling while it gives its weights, and the ranks know nothing of it.

    Raises:
        MegarlError: the engine that comes did not take them.
    """
    failed: set[int] = set()
    while not closing():
        version = rollouts.version
        others, having = having_weights(rollouts, version, failed)
        if having:
            source = min(having, key=lambda one: one.load)
            if not _copy(rollouts, source, actor, version):
                failed.add(source.number)
            elif rollouts.version == version:
                return version, source.number
        elif any(one.version is not None for one in others):
            time.sleep(POLL_S)  # they are being given newer ones
        else:
            break
    return None, None


def having_weights(
    rollouts: Rollouts, version: int, failed: Container[int] = ()
) -> tuple[list[EngineState], list[EngineState]]:
    """The engines that may have weights to give, but for those that `failed`, and those of them that have `version` now."""
    engines = rollouts.scheduler.engines
    others = [one for one in engines if one.is_up and one.number not in failed and not one.is_absent]
    return others, [one for one in others if one.version == version and one.is_open.is_set()]


def _copy(rollouts: Rollouts, source: EngineState, actor: Any, version: int) -> bool:
    """Copy all weights of an engine; returns whether it gave them."""
    deadline_s, giver = rollouts.config.rollout.deadlines.update_s, rollouts.engines[source.number]
    ends_at = time.monotonic() + deadline_s
    answer(submit(actor, Engine.begin_update, version, None), ends_at)
    asked = ask(giver, version, 0)
    taking: Any = None
    while asked is not None:
        start, given = asked
        try:
            following = answer(start, ends_at)
        except MegarlError:  # it failed, or has been given newer ones
            if taking is not None:
                answer(taking, ends_at)
            answer(submit(actor, Engine.abandon_update), ends_at)
            return False
        asked = ask(giver, version, following) if following is not None else None
        if taking is not None:
            answer(taking, ends_at)
        taking = submit(actor, Engine.take_weights, given)  # which Ray brings there
    answer(taking, ends_at)
    answer(submit(actor, Engine.end_update, version), ends_at)
    return True


def ask(giver: Any, version: int, start: int) -> Any:
    """Have an engine give some weights: Ray's references to where the next begin, and to these."""
    return giver.call.options(num_returns=2).remote(Engine.give_weights.__name__, version, start)


def answer(reference: Any, ends_at: float) -> Any:
    """Wait for an engine's answer; raises what it raised, WorkerError if its process is gone, or DeadlineError."""
    try:
        return ray.get(reference, timeout=max(0.0, ends_at - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise DeadlineError("an engine did not give or take weights in time (rollout.deadlines.update_s)") from None
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, MegarlError):
            raise cause from None
        raise WorkerError(f"an engine was lost while it gave or took weights: {error}") from error
