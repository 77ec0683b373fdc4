"""Whether the ranks of a group answer, for a thread that watches a run: asked seldom, and never waited for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from megarl.observe.run_state import RankCondition

BETWEEN_S = 5.0
"""Answers of ranks count for so long."""
WAIT_S = 0.2
"""For answers, at a look."""
SILENT_S = 30.0
"""A rank that has not answered for so long is silent: it is stopped, or stuck outside Python."""


class RankWatch:
    """The state of Ray actors with a method `progress` that answers while others run. At most one question to each is open."""

    def __init__(self, actors: Sequence[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._actors, self._clock = list(actors), clock
        self._states: list[RankCondition] = ["up"] * len(self._actors)
        self._asked: dict[int, tuple[Any, float]] = {}
        self._looked_at = float("-inf")

    def states(self) -> list[RankCondition]:
        """In rank order, as of at most `BETWEEN_S` seconds ago. For one thread at a time."""
        if self._clock() - self._looked_at >= BETWEEN_S:
            self._look()
            self._looked_at = self._clock()
        return list(self._states)

    def _look(self) -> None:
        for rank, actor in enumerate(self._actors):
            if rank not in self._asked and self._states[rank] != "gone":
                self._asked[rank] = (actor.progress.remote(), self._clock())
        references = {reference: rank for rank, (reference, _) in self._asked.items()}
        done = ray.wait([*references], num_returns=len(references), timeout=WAIT_S)[0] if references else []
        for reference in done:
            rank = references[reference]
            del self._asked[rank]
            try:
                ray.get(reference, timeout=WAIT_S)
            except ray.exceptions.RayActorError:
                self._states[rank] = "gone"
            except ray.exceptions.RayError:
                continue  # it says nothing of the rank
            else:
                self._states[rank] = "up"
        for rank, (_, since) in self._asked.items():
            if self._clock() - since >= SILENT_S:
                self._states[rank] = "silent"
