"""Whether the ranks of a group answer, for a thread that watches a run: asked seldom, and never waited for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from megarl.observe.run_state import RankCondition

BETWEEN_S = 5.0
"""Answers of ranks count for so long, or longer where there are many actors to ask."""
SECONDS_PER_ACTOR = 0.01
"""Between two rounds of questions, for each actor: a question costs the driver about a twentieth of that."""
WAIT_S = 0.2
"""For answers, at a look."""
SILENT_S = 30.0
"""A rank that has not answered for so long is silent: it is stopped, or stuck outside Python."""


class RankWatch:
    """The state of ranks whose Ray actors have a method `progress` that answers while others run, or of nodes that say the
    states of their ranks. At most one question to each actor is open."""

    def __init__(
        self,
        actors: Sequence[Any],
        clock: Callable[[], float] = time.monotonic,
        *,
        of_nodes: Sequence[Sequence[int]] | None = None,
        between_s: float | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        """`of_nodes`: the numbers of the ranks of each actor, a `NodeRanksActor`; None: each is a rank. `between_s`: how long
        answers count; `silent_s`: when who has not answered is silent."""
        self._actors, self._clock, self._of_nodes = list(actors), clock, of_nodes
        self._ranks = of_nodes or [[number] for number in range(len(self._actors))]
        self._states: list[RankCondition] = ["up"] * sum(map(len, self._ranks))
        self._between_s = max(BETWEEN_S, SECONDS_PER_ACTOR * len(self._actors)) if between_s is None else between_s
        self._silent_s = silent_s
        self._gone: set[int] = set()
        self._asked: dict[int, tuple[Any, float]] = {}
        self._looked_at = float("-inf")

    def states(self) -> list[RankCondition]:
        """In rank order, as of a few seconds ago at most. For one thread at a time."""
        if self._clock() - self._looked_at >= self._between_s:
            self._look()
            self._looked_at = self._clock()
        return list(self._states)

    def _look(self) -> None:
        for number, actor in enumerate(self._actors):
            if number not in self._asked and number not in self._gone:
                question = actor.progress if self._of_nodes is None else actor.states
                self._asked[number] = (question.remote(), self._clock())
        references = {reference: number for number, (reference, _) in self._asked.items()}
        done = ray.wait([*references], num_returns=len(references), timeout=WAIT_S)[0] if references else []
        for reference in done:
            number = references[reference]
            del self._asked[number]
            try:
                answer = ray.get(reference, timeout=WAIT_S)
            except ray.exceptions.RayActorError:
                self._gone.add(number)
                self._note(number, "gone")
            except ray.exceptions.RayError:
                continue  # it says nothing of the rank
            else:
                self._note(number, "up" if self._of_nodes is None else answer)
        for number, (_, since) in self._asked.items():
            if self._clock() - since >= self._silent_s:
                self._note(number, "silent")

    def _note(self, number: int, states: RankCondition | Sequence[RankCondition]) -> None:
        ranks = self._ranks[number]
        for rank, state in zip(ranks, [states] * len(ranks) if isinstance(states, str) else states, strict=True):
            self._states[rank] = state
