"""The ranks of one node called as one, by an actor on that node: what a call costs the driver then grows with nodes.

A rank's failure reaches the driver at once, with the rank's number.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from megarl.errors import MegarlError
from megarl.observe.run_state import RankCondition
from megarl.system.process_exit import end_with_parent
from megarl.workers.rank_watch import SILENT_S, RankWatch

DIRECT_RANKS = 64
"""A group of so many ranks is called rank by rank: it needs no further processes, and costs the driver some milliseconds."""

LATE_S = 5.0
"""For nodes to say which of their ranks have not answered."""


class RankFailure(Exception):
    """The rank at a place among those of a node failed, but not by a mistake of the user's."""

    def __init__(self, place: int, said: str) -> None:
        super().__init__(place, said)
        self.place, self.said = place, said

    def __str__(self) -> str:
        return self.said


@dataclass(frozen=True)
class NodeHandle:
    """A node's `NodeRanksActor`, and the numbers of its ranks in their group."""

    actor: Any
    ranks: Sequence[int]


def late_ranks(nodes: Sequence[NodeHandle], places: Sequence[int], calls: int) -> list[int]:
    """The ranks of some nodes that have not answered all of so many calls; all of a node that does not say."""
    questions = {nodes[place].actor.late.remote(calls): nodes[place].ranks for place in places}
    ray.wait([*questions], num_returns=len(questions), timeout=LATE_S)
    late = []
    for question, ranks in questions.items():
        try:
            late += [ranks[place] for place in ray.get(question, timeout=0)]
        except ray.exceptions.RayError:
            late += ranks
    return sorted(late)


class NodeRanks:
    """Some ranks' actors, called together."""

    def __init__(self, actors: Sequence[Any], silent_s: float = SILENT_S) -> None:
        self._actors = list(actors)
        self._unanswered: Counter[int] = Counter()
        self._calls, self._turn = 0, asyncio.Condition()
        self._watch = RankWatch(self._actors, between_s=0, silent_s=silent_s)

    async def call(self, number: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers of all ranks to a method, each called with arguments of its own; the `number`-th call from 0 on.

        Calls reach the ranks in the order of their numbers; Ray keeps no order for an actor that does several things at once.

        Raises:
            MegarlError: a rank raised it.
            RankFailure: a rank raised anything else, or is gone.
        """
        # references among the arguments are the ranks' to fetch
        async with self._turn:
            await self._turn.wait_for(lambda: self._calls == number)
            asked = [actor.call.remote(method, *one) for actor, one in zip(self._actors, arguments, strict=True)]
            self._unanswered.update(range(len(self._actors)))
            self._calls += 1
            self._turn.notify_all()
        return await asyncio.gather(*(self._answer(place, reference) for place, reference in enumerate(asked)))

    async def call_stored(
        self, number: int, method: str, arguments: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, tuple[Any, list[Any]]]:
        """`call` of a method that answers two values, of the ranks at some places: by place the first value, and a reference to
        the second one, in a list, as a reference by itself would be fetched."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._calls == number)
            asked = {
                place: self._actors[place].call.options(num_returns=2).remote(method, *one) for place, one in arguments.items()
            }
            self._unanswered.update([*asked])
            self._calls += 1
            self._turn.notify_all()
        firsts = await asyncio.gather(*(self._answer(place, first) for place, (first, _) in asked.items()))
        return {place: (first, [second]) for first, (place, (_, second)) in zip(firsts, asked.items(), strict=True)}

    async def _answer(self, place: int, reference: Any) -> Any:
        try:
            return await asyncio.wrap_future(reference.future())
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, MegarlError) else RankFailure(place, str(error)) from None
        finally:
            self._unanswered[place] -= 1

    async def late(self, calls: int) -> list[int]:
        """The places of ranks that have not answered all of so many calls."""
        if self._calls < calls:
            return [*range(len(self._actors))]
        return sorted(place for place, count in self._unanswered.items() if count)

    async def states(self) -> list[RankCondition]:
        """Return whether each rank answers."""
        return await asyncio.to_thread(self._watch.states)


class NodeRanksProcess(NodeRanks):
    """`NodeRanks` in a process of its own, which ends with the node's Ray."""

    def __init__(self, actors: Sequence[Any], silent_s: float = SILENT_S) -> None:
        end_with_parent()
        super().__init__(actors, silent_s)


# Ray's decorator gives classes methods that their types do not show.
NodeRanksActor: Any = ray.remote(max_concurrency=1000, num_cpus=0)(NodeRanksProcess)
