"""A group of training workers that share one torch.distributed world, called as one, with a deadline on every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol, TypeVar, TypeVarTuple

import ray

from megarl.config.layout import Layout
from megarl.data.shares import Share
from megarl.data.stored import Held, Stored
from megarl.data.stored_shares import StoredShare
from megarl.errors import DeadlineError, MegarlError, RankLostError, WorkerError
from megarl.observe.run_state import RankCondition
from megarl.workers.failure_report import examine
from megarl.workers.node_ranks import NodeHandle, RankFailure, late_ranks
from megarl.workers.object_store import RayObject
from megarl.workers.rank_calls import RankCalls
from megarl.workers.rank_watch import RankWatch
from megarl.workers.ray_answers import AnswerFailed, NotAnswered, results_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
GLANCE_S = 0.2
"""How long a look at a rank's progress may take."""


class RankGroup(Protocol):
    """The ranks of one layout as the driver calls them: by the methods of `RankCalls`, such as `RankCalls.forward`."""

    name: str
    layout: Layout
    platform: str
    """The name of the platform that the ranks run on."""

    def call(self, method: Callable[[RankCalls, *Ts], T], *arguments: *Ts, phase: str, deadline_s: float) -> list[T]:
        """Results of `method` in rank order; all ranks get the same arguments."""
        ...

    def submit(self, method: Callable[[RankCalls, *Ts], object], per_rank: Sequence[tuple[*Ts]]) -> list[Any]:
        """Start `method` on every rank with arguments of its own; give the answer to `wait`."""
        ...

    def wait(self, submitted: Sequence[Any], *, phase: str, deadline_s: float) -> list[Any]:
        """Results of what was submitted, in rank order."""
        ...

    def per_rank(self, replicas: Sequence[Sequence[Share]]) -> list[Any]:
        """For every rank its data-parallel replica's shares, as an argument of `submit`."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true in any process that drives this group."""
        ...

    def progress(self) -> tuple[int, int]:
        """Micro-batches that the first rank has begun in the pass under way, and all of them; (0, 0) if it does not say."""
        ...

    def states(self) -> list[RankCondition]:
        """Return whether each rank answers, in rank order; empty where this process does not know. For one other thread
        to ask."""
        ...


class StoringGroup(RankGroup, Protocol):
    """Ranks whose answers can stay where they are computed."""

    reporting: Sequence[int]
    """By data-parallel replica the rank whose results speak for it."""

    def shared(self, value: Any) -> Any:
        """An argument that many ranks are sent, kept once."""
        ...

    def whole(self, replica: int, shares: Sequence[Share]) -> Any:
        """The shares of a replica with their tokens, as an argument of its ranks."""
        ...

    def submit_stored(self, method: Callable[[RankCalls, *Ts], object], per_rank: Mapping[int, tuple[*Ts]]) -> Any:
        """Start `method`, which answers two values, on some ranks; see `WorkerGroup.submit_stored`."""
        ...

    def wait_stored(self, submitted: Any, *, phase: str, deadline_s: float) -> Mapping[int, tuple[Any, Stored]]:
        """By rank the first value of what was submitted, and a handle to the second one, which stays where it is."""
        ...


class WorkerGroup:
    """The Ray actors of one layout, in rank order."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        actors: Sequence[Any],
        log_folder: str,
        platform: str = "cpu",
        nodes: Sequence[NodeHandle] = (),
    ) -> None:
        """`nodes` call the ranks, each those on it; none: they are called one by one."""
        self.name, self.log_folder, self.platform = name, log_folder, platform
        self.host_and_pid: list[tuple[str, int]] = []
        """(Node IP, process id) by rank, once they have started."""
        self.regroup(layout, actors, nodes)
        self.lost: list[int] = []
        """Ranks whose processes were gone when a call was last looked into."""

    def regroup(self, layout: Layout, actors: Sequence[Any], nodes: Sequence[NodeHandle] = ()) -> None:
        """Have these actors be the ranks, in a world that is yet to be connected."""
        self.layout, self.actors, self.nodes, self._calls = layout, list(actors), list(nodes), 0
        self.host_and_pid = []
        self._replicas = [layout.coords(rank).dp for rank in range(layout.world_size)]
        self.reporting: Sequence[int] = reporting_ranks(layout)
        of_nodes = [node.actor for node in self.nodes], [node.ranks for node in self.nodes]
        self.states = (RankWatch(of_nodes[0], of_nodes=of_nodes[1]) if self.nodes else RankWatch(self.actors)).states

    def connect(self, *, seed: int, deadline_s: float) -> list[int]:
        """Bring up the world; returns the ranks' process ids."""
        phase = f"start of {self.name}"
        started = [actor.host_and_pid.remote() for actor in self.actors]
        self.host_and_pid = wait_for(started, phase=phase, deadline_s=deadline_s, whose=self)
        [address] = wait_for([self.actors[0].address.remote()], phase=phase, deadline_s=deadline_s, whose=self)
        return self.call(RankCalls.connect, address, seed, deadline_s, phase=phase, deadline_s=deadline_s)

    def call(self, method: Callable[[RankCalls, *Ts], T], *arguments: *Ts, phase: str, deadline_s: float) -> list[T]:
        """Call `method` on every rank with the same arguments and wait for all of them; results in rank order.

        Raises:
            MegarlError: a rank raised it: the user's mistake, passed on.
            WorkerError: a rank raised anything else or died; carries the rank's traceback.
            DeadlineError: a rank had not answered after `deadline_s`; names the ranks.
        """
        return self.wait(self.submit(method, [arguments] * len(self.actors)), phase=phase, deadline_s=deadline_s)

    def wait(self, submitted: Sequence[Any], *, phase: str, deadline_s: float) -> list[Any]:
        """Results of what was submitted, in rank order; raises as `call` does."""
        if not self.nodes:
            return wait_for(submitted, phase=phase, deadline_s=deadline_s, whose=self)
        results: dict[int, Any] = {}
        for node, answers in zip(self.nodes, self._of_nodes(submitted, phase, deadline_s), strict=True):
            results |= zip(node.ranks, answers, strict=True)
        return [results[rank] for rank in range(len(self.actors))]

    def _of_nodes(self, submitted: Sequence[Any], phase: str, deadline_s: float) -> list[Any]:
        try:
            return results_of(submitted, deadline_s)
        except NotAnswered as late:
            raise _deadline_error(late_ranks(self.nodes, late.places, self._calls), phase, deadline_s, self) from None
        except AnswerFailed as failure:
            _raise_ours(failure.error, phase, self, failure.place)

    def submit(self, method: Callable[[RankCalls, *Ts], object], per_rank: Sequence[tuple[*Ts]]) -> list[Any]:
        """Start `method` on every rank without waiting; give the references to `wait`."""
        if self.nodes:
            number, self._calls, name = self._calls, self._calls + 1, method.__name__
            return [node.actor.call.remote(number, name, [per_rank[rank] for rank in node.ranks]) for node in self.nodes]
        return [actor.call.remote(method.__name__, *arguments) for actor, arguments in zip(self.actors, per_rank, strict=True)]

    def submit_stored(
        self, method: Callable[[RankCalls, *Ts], object], per_rank: Mapping[int, tuple[*Ts]]
    ) -> Mapping[int, list[Any]] | list[Any]:
        """Start `method`, which answers two values, on some ranks, with arguments of their own; give the answer to
        `wait_stored`."""
        if self.nodes:
            number, self._calls, name = self._calls, self._calls + 1, method.__name__
            places = (
                {place: per_rank[rank] for place, rank in enumerate(node.ranks) if rank in per_rank} for node in self.nodes
            )
            return [
                node.actor.call_stored.remote(number, name, of_node) for node, of_node in zip(self.nodes, places, strict=True)
            ]
        return {
            rank: self.actors[rank].call.options(num_returns=2).remote(method.__name__, *arguments)
            for rank, arguments in per_rank.items()
        }

    def wait_stored(
        self, submitted: Mapping[int, list[Any]] | list[Any], *, phase: str, deadline_s: float
    ) -> dict[int, tuple[Any, RayObject]]:
        """By rank the first value of what was submitted, and a handle to the second one, which stays where it is."""
        if isinstance(submitted, Mapping):
            firsts = [first for first, _ in submitted.values()]
            answers = wait_for(firsts, phase=phase, deadline_s=deadline_s, whose=self, ranks=[*submitted])
            seconds = (RayObject(second) for _, second in submitted.values())
            return dict(zip(submitted, zip(answers, seconds, strict=True), strict=True))
        told: dict[int, tuple[Any, RayObject]] = {}
        for node, of_node in zip(self.nodes, self._of_nodes(submitted, phase, deadline_s), strict=True):
            told |= {node.ranks[place]: (first, RayObject(second)) for place, (first, [second]) in of_node.items()}
        return {rank: told[rank] for rank in sorted(told)}

    def per_rank(self, replicas: Sequence[Sequence[Share]]) -> list[Any]:
        """For every rank a reference to its data-parallel replica's shares, each put once into the object store.

        Shares whose tokens lie in a store are made whole by the replica's reporting rank, which is handed these.
        """
        references = [self.whole(replica, shares) for replica, shares in enumerate(replicas)]
        return [references[replica] for replica in self._replicas]

    def shared(self, value: Any) -> Any:
        """A reference to a value that many ranks are sent."""
        return ray.put(value)

    def whole(self, replica: int, shares: Sequence[Share]) -> Any:
        """A reference to the shares of a replica with their tokens."""
        if not any(isinstance(share, StoredShare) for share in shares):
            return ray.put(shares)
        stored = [entry for share in shares if isinstance(share, StoredShare) for entry in share.objects]
        references = [entry.reference for entry in stored if isinstance(entry, RayObject)]
        assert len(references) == len(stored), "what engines and ranks of a cluster keep is in its store"
        return self.actors[self.reporting[replica]].call.remote("whole_shares", [*map(_without_handles, shares)], *references)

    def any_rank(self, flag: bool) -> bool:
        """`flag`: there is one driver."""
        return flag

    def progress(self) -> tuple[int, int]:
        """See `RankGroup.progress`; asked while the ranks are busy, by a thread that draws."""
        try:
            return ray.get(self.actors[0].progress.remote(), timeout=GLANCE_S)
        except ray.exceptions.RayError:
            return 0, 0

    def examine(self, phase: str) -> tuple[list[str], str]:
        """Find the ranks that are gone or do not answer, after a call in `phase` failed, and a clause for the error that
        says so.

        Every rank's stacks and last log lines are written beside the run's logs; gives up after a few seconds.
        """
        try:
            examined = examine(self.name, self.actors, self.host_and_pid, phase, self.log_folder)
        except (ray.exceptions.RayError, OSError) as error:
            return [], f"; could not collect the ranks' stack traces ({error})"
        self.lost = [examined_rank.rank for examined_rank in examined if examined_rank.is_gone]
        silent = [f"rank {examined_rank.rank} of {self.name}" for examined_rank in examined if examined_rank.state]
        states = [self._describe(examined_rank.rank, examined_rank.state) for examined_rank in examined if examined_rank.state]
        where = f"the Python stacks and last log lines of its ranks are in {self.log_folder}/stacks"
        return silent, "; " + "; ".join([*states, where])

    def name_of(self, place: int, of_node: int | None) -> str:
        """The name of who gave the answer at a place: a rank, or a node or one of its ranks."""
        if not self.nodes:
            return f"rank {place} of {self.name}"
        ranks = self.nodes[place].ranks
        if of_node is None:
            return f"the process that calls ranks {[*ranks]} of {self.name}"
        return f"rank {ranks[of_node]} of {self.name}"

    def _describe(self, rank: int, state: str) -> str:
        at = f" (process {self.host_and_pid[rank][1]} on {self.host_and_pid[rank][0]})" if self.host_and_pid else ""
        return f"rank {rank} of {self.name}{at} {state}"

    def kill(self) -> None:
        """End the group's processes, and no others."""
        for actor in (*self.actors, *(node.actor for node in self.nodes)):
            ray.kill(actor, no_restart=True)


def _without_handles(share: Share) -> Share:
    return replace(share, objects=(Held(None),) * len(share.objects)) if isinstance(share, StoredShare) else share


def reporting_ranks(layout: Layout) -> list[int]:
    """By data-parallel replica the rank whose results speak for it: last stage, first tensor and context rank."""
    at = {layout.coords(rank): rank for rank in range(layout.world_size)}
    reporting = {c.dp: rank for c, rank in at.items() if c.pp == layout.pp - 1 and not c.tp and not c.cp}
    return [reporting[replica] for replica in range(layout.dp)]


def wait_for(
    references: Sequence[Any],
    *,
    phase: str,
    deadline_s: float,
    whose: WorkerGroup | Sequence[str],
    ranks: Sequence[int] | None = None,
) -> list[Any]:
    """Results of Ray references in order; the first failure ends the wait (see `WorkerGroup.call` for what it raises).

    `whose`: the group whose ranks answer, all or these `ranks`; or the names of those who do.
    """
    try:
        return results_of(references, deadline_s)
    except NotAnswered as late:
        missing = late.places if ranks is None else [ranks[place] for place in late.places]
        raise _deadline_error(missing, phase, deadline_s, whose) from None
    except AnswerFailed as failure:
        _raise_ours(failure.error, phase, whose, failure.place if ranks is None else ranks[failure.place])


def _deadline_error(missing: list[int], phase: str, deadline_s: float, whose: WorkerGroup | Sequence[str]) -> DeadlineError:
    if isinstance(whose, WorkerGroup):
        late = f"ranks of {whose.name} {missing}"
        silent, clause = whose.examine(phase)
    else:
        late, silent, clause = ", ".join(whose[index] for index in missing), [], ""
    error = DeadlineError(f"phase '{phase}' was not done after {deadline_s:.0f} s: {late} had not answered{clause}")
    error.who = ", ".join(silent) or late
    return error


def _raise_ours(error: Exception, phase: str, whose: WorkerGroup | Sequence[str], place: int) -> NoReturn:
    """Raise what the user is told of an error of Ray's, which was the answer at a place."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, MegarlError):
        raise cause from error
    if isinstance(whose, WorkerGroup):
        name = whose.name_of(place, cause.place if isinstance(cause, RankFailure) else None)
        silent, clause = whose.examine(phase)
    else:
        name, silent, clause = whose[place], [], ""
    said = cause if isinstance(cause, RankFailure) else error
    kind = RankLostError if isinstance(whose, WorkerGroup) and whose.lost else WorkerError
    ours = kind(f"{name} failed in phase '{phase}'{clause}:\n{said}")
    ours.who = ", ".join(silent) or name  # a rank that is gone makes others fail, which may be heard of first
    raise ours from error
