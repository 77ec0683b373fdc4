"""Several engines at once: what is under way on them is cut, how far they are, and which of them have failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from megarl.rollout.scheduling.engine_state import AskedGroups, EngineState, PendingResult

CUT_POLL_S = 0.02
"""Between two times that an engine is told to cut."""
MENTIONED = 16
"""Engines that a sentence names at most."""


async def cut_short(requests: Sequence[AskedGroups], deadline_s: float) -> None:
    """Have engines end what they work on for these requests, and wait until what there is of it has been kept.

    What an engine does not give in `deadline_s` seconds is lost. The requests must then be cancelled.
    """
    for request in requests:
        request.is_cut = True
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + deadline_s
    while (working := [request for request in requests if request.under_way]) and loop.time() < ends_at:
        calls = [pending.engine.handle.cut(pending.keys_under_way, deadline_s=deadline_s) for pending in working]
        await asyncio.gather(*calls, return_exceptions=True)  # an engine that failed has nothing to give
        await asyncio.sleep(CUT_POLL_S)  # again: the engine may have got the request after this


def progress_text(engines: Sequence[EngineState]) -> str:
    """Describe what each engine does, as the end of a sentence."""
    there = [engine for engine in engines if not engine.is_absent]
    does = {
        engine.number: "sleeps" if engine.rests else "is down" if engine.version is None else f"works on {engine.groups}"
        for engine in there[:MENTIONED]
    }
    said, others = [f"engine {number} {what}" for number, what in does.items()], there[MENTIONED:]
    if others:
        said.append(f"{len(others)} further engines work on {sum(engine.groups for engine in others)}")
    return ", ".join(said)


def failures(answers: Mapping[int, object]) -> dict[int, Exception]:
    """The engines that raised something, of those that `Scheduler.on_each` asked."""
    return {engine: answer for engine, answer in answers.items() if isinstance(answer, Exception)}


def all_done(answers: Sequence[PendingResult]) -> Callable[[], bool]:
    """A function that says whether all are there; it looks at each of them once more after it has come, and not again."""
    left = list(answers)

    def done() -> bool:
        while left and left[-1].done():
            left.pop()
        return not left

    return done
