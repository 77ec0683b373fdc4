"""A cluster in virtual time, in which the state machines of `resources.spares` work: Ray answers, and takes what is assumed.

`RankReplacement`, `Memory` and `Places` are megarl's own. What they ask of Ray, of ranks and of nodes is answered here: nothing
is computed, and the clock moves. A place stands for a node's GPUs, which are lost together.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

import ray.exceptions  # noqa: E402

from megarl.checkpoint.dist_writer import Written  # noqa: E402
from megarl.config.layout import Layout  # noqa: E402
from megarl.errors import DeadlineError, RankLostError, WorkerError  # noqa: E402
from megarl.options.elastic import memory, places, recovery  # noqa: E402
from megarl.options.elastic.node_memory import Sent  # noqa: E402
from megarl.options.elastic.rank_memory import KeepInMemory, PutBack  # noqa: E402
from megarl.options.elastic.rank_process import Become, leave  # noqa: E402
from megarl.options.elastic.shared_file import KeptPart  # noqa: E402
from megarl.weights.placement import Bundle, Placement  # noqa: E402
from megarl.workers.group import WorkerGroup  # noqa: E402

NEVER = float("inf")


@dataclass(frozen=True)
class Failure:
    """Something fails at `at_s`: `effect` is `node`, `pair` (a node and its buddy), `process`, `hang` or `silent`; `where` is a
    number from 0 to 1 that says which of the run's places it is."""

    at_s: float
    kind: str
    effect: str
    where: float


class Reference:
    """An answer of an actor, which is there from `ready_s` on, unless the actor is gone."""

    __slots__ = ("actor", "ready_s", "value")

    def __init__(self, value: Any, ready_s: float, actor: Any) -> None:
        self.value, self.ready_s, self.actor = value, ready_s, actor


class Cluster:
    """Nodes, of which a run has some; `failures` come in the order of their times."""

    def __init__(self, run_nodes: int, spare_nodes: int, seconds: Mapping[str, float], failures: Iterable[Failure]) -> None:
        """`seconds`: those that each activity takes, by name (`benchmarks/failures_at_scale.py`)."""
        self.now, self.seconds = 0.0, seconds
        self._failures = iter(failures)
        self._next = next(self._failures, None)
        self._serial = 0
        self.node_of = [self._name() for _ in range(run_nodes)]
        """By place the node that Ray has it on."""
        self.free = [self._name() for _ in range(spare_nodes)]
        self.reserved: list[str] = []
        """Nodes of the spares, as long as these are reserved."""
        self.repairs: list[float] = []
        """Times at which nodes are back, in order."""
        self.lost_nodes: set[str] = set()
        self.group: Any = None
        self.memory: Any = None
        self.actors: list[Process] = []
        self.last: Failure | None = None
        self.counts: dict[str, int] = {}
        self.buddies_have_all = False
        """Whether a node that is lost while its files are sent had sent the last of them."""

    def _name(self) -> str:
        self._serial += 1
        return f"node {self._serial:06}"

    @property
    def next_failure_s(self) -> float:
        """When something fails next."""
        return self._next.at_s if self._next is not None else NEVER

    def advance(self, to_s: float) -> None:
        """Let time pass; what fails and what is repaired meanwhile happens."""
        while min(self.next_failure_s, self.repairs[0] if self.repairs else NEVER) <= to_s:
            if self.repairs and self.repairs[0] <= self.next_failure_s:
                self.now = max(self.now, self.repairs.pop(0))
                self.free.append(self._name())
                continue
            assert self._next is not None
            failure, self._next = self._next, next(self._failures, None)
            self.now = max(self.now, failure.at_s)
            self._apply(failure)
        self.now = max(self.now, to_s)

    def _apply(self, failure: Failure) -> None:
        self.last = failure
        self.counts[failure.kind] = self.counts.get(failure.kind, 0) + 1
        used = self.group.actors if self.group is not None else []
        if not used:
            if failure.effect not in ("process", "hang"):
                self._lose(self.node_of[int(failure.where * len(self.node_of))])
            return
        actor = used[int(failure.where * len(used))]
        if failure.effect in ("process", "hang"):
            actor.died_s = self.now
            return
        self._lose(actor.node)
        kept = self.memory.kept if self.memory is not None else None
        if failure.effect == "pair" and kept is not None and kept.buddies.get(actor.node):
            self._lose(kept.buddies[actor.node])

    def _lose(self, node: str | None) -> None:
        if node is None or node in self.lost_nodes:
            return
        self.lost_nodes.add(node)
        self.repairs.append(self.now + self.seconds["repair"])
        self.repairs.sort()
        for actor in self.actors:
            if actor.node == node:
                actor.died_s = self.now
        self.actors = [actor for actor in self.actors if actor.is_alive]

    def place_again(self, number: int) -> str | None:
        """The node of a place; where that is lost another one, if some node is free."""
        if self.node_of[number] in self.lost_nodes and self.free:
            self.node_of[number] = self.free.pop(0)
        node = self.node_of[number]
        return None if node in self.lost_nodes else node

    def settle(self, layout: Layout) -> Layout:
        """Have a run that starts again on the nodes that are there, with as many replicas as these make; places of others have
        no node until some are repaired."""
        of_replica = layout.world_size // layout.dp
        nodes = [node for node in self.node_of if node not in self.lost_nodes] + self.free
        fits = replace(layout, dp=min(layout.dp, len(nodes) // of_replica))
        gone = [f"no {self._name()}" for _ in range(layout.world_size - fits.world_size)]
        self.lost_nodes |= {*gone}
        self.node_of, self.free = nodes[: fits.world_size] + gone, nodes[fits.world_size :]
        return fits

    def release(self) -> None:
        """Give up the reservation of spares."""
        self.free += [node for node in self.reserved if node not in self.lost_nodes]
        self.reserved = []

    # What Ray has, by the names that the option calls.

    def get(self, asked: Any, timeout: float | None = None) -> Any:
        """`ray.get`."""
        if isinstance(asked, list):
            return [self.get(one, timeout) for one in asked]
        if not isinstance(asked, Reference):
            return asked
        until = NEVER if timeout is None else self.now + timeout
        while isinstance(asked.actor, Actor) and asked.actor.is_alive and not asked.actor.has_node():
            if not self.repairs or self.repairs[0] > until:
                self.advance(until)
                raise ray.exceptions.GetTimeoutError("no node is free")
            self.advance(self.repairs[0])
        ready_s = max(asked.ready_s, asked.actor.started_s)
        if ready_s > asked.actor.died_s:
            raise ray.exceptions.RayActorError
        if ready_s > until:
            self.advance(until)
            raise ray.exceptions.GetTimeoutError("it takes longer")
        self.advance(ready_s)
        return asked.value(asked.actor) if callable(asked.value) else asked.value

    def wait(self, asked: Sequence[Reference], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """`ray.wait`: what will not come has no node, or comes later."""
        ready = [self._ready_s(one) for one in asked]
        self.advance(min(self.now + timeout, max(self.now, sorted(ready)[num_returns - 1])))
        pairs = [*zip(asked, ready, strict=True)]
        return [one for one, at_s in pairs if at_s <= self.now], [one for one, at_s in pairs if at_s > self.now]

    def _ready_s(self, one: Reference) -> float:
        if not one.actor.is_alive:
            return self.now
        if isinstance(one.actor, Actor) and not one.actor.has_node():
            return NEVER
        return max(one.ready_s, one.actor.started_s)

    def put(self, value: Any) -> Any:
        """`ray.put`."""
        return value

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        """`ray.kill`."""
        actor.died_s = min(actor.died_s, self.now)

    def cluster_resources(self) -> dict[str, float]:
        """`ray.cluster_resources`."""
        return {"GPU": float(len(self.node_of) + len(self.free))}

    def available_resources(self) -> dict[str, float]:
        """`ray.available_resources`."""
        return {"GPU": float(len(self.free))}

    exceptions = ray.exceptions


class Process:
    """A process of Ray's on a node."""

    node: str | None = None
    started_s = 0.0
    died_s = NEVER

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.died_s == NEVER


class Actor(Process):
    """A process that is a rank, or will be one, at a place of the run."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.started_s = NEVER
        self.has_node()

    def has_node(self) -> bool:
        """Whether Ray has found a node for it, or does now."""
        if self.node is None and (node := self.cluster.place_again(self.number)) is not None:
            self.node, self.started_s = node, self.cluster.now + self.cluster.seconds["start process"]
            self.cluster.actors.append(self)
        return self.node is not None

    @property
    def __ray_call__(self) -> Any:
        return SimpleNamespace(remote=self._asked, options=lambda **named: SimpleNamespace(remote=self._asked))

    def _asked(self, question: Any) -> Reference:
        now, seconds = self.cluster.now, self.cluster.seconds
        if question is memory._node_id:
            return Reference(lambda actor: actor.node, now, self)
        if question is leave:
            return Reference(None, now + seconds["leave"], self)
        if isinstance(question, Become):
            return Reference(None, max(now, self.started_s) + seconds["become"], self)
        if question is places._whereabouts:
            return Reference(lambda actor: Bundle(actor.node, 0), now, self)
        return Reference(None, now, self)


class NodeMemory(Process):
    """The owner of a node's shared memory."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster, self.node = cluster, node
        cluster.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._answer(name, arguments))

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Reference:
        now = self.cluster.now
        if name == "complete":
            return Reference(Sent(), now + self.cluster.seconds["send"], self)
        if name == "has":
            return Reference(self.cluster.buddies_have_all, now, self)
        return Reference(2**60 if name == "free_bytes" else None, now, self)


class Group(WorkerGroup):
    """The ranks of the run."""

    def __init__(self, cluster: Cluster, layout: Layout, actors: list[Any]) -> None:
        self.cluster, self.name, self.log_folder, self.platform, self.lost = cluster, "policy", "", "cuda", []
        self.regroup(layout, actors)
        self.host_and_pid = [(actor.node, 0) for actor in actors]

    def regroup(self, layout: Layout, actors: Sequence[Any], nodes: Sequence[Any] = ()) -> None:
        """Have these actors be the ranks."""
        self.layout, self.actors, self.nodes, self.states = layout, list(actors), [], list

    def connect(self, *, seed: int, deadline_s: float) -> list[int]:
        """Groups are built."""
        self.work("connect")
        self.host_and_pid = [(actor.node, 0) for actor in self.actors]
        return []

    def submit(self, method: Any, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Remember what is asked."""
        question = per_rank[0][1]
        return ["copy" if isinstance(question, KeepInMemory) else "put back" if isinstance(question, PutBack) else "ask"]

    def wait(self, submitted: Sequence[Any], *, phase: str, deadline_s: float) -> list[Any]:
        """Take the time of it."""
        self.work(submitted[0])
        return [KeptPart(Written(), 0, 0.0)] * len(self.actors)

    def work(self, activity: str | float) -> None:
        """Let ranks do something together, which a loss ends.

        Raises:
            RankLostError: a rank is gone; it is noticed some time after.
        """
        took = self.cluster.seconds.get(activity, 0.0) if isinstance(activity, str) else activity
        self.check()
        until = self.cluster.now + took
        while self.cluster.next_failure_s <= until:
            self.cluster.advance(self.cluster.next_failure_s)
            failure = self.cluster.last
            assert failure is not None
            if failure.effect == "silent":  # it is found when replicas are compared, at the end of the step
                self.cluster.advance(until)
            self.notice(failure)
        self.cluster.advance(until)
        self.check()

    def notice(self, failure: Failure) -> None:
        """Let the time pass until a loss is noticed."""
        effect = {"pair": "node", "silent": "process"}.get(failure.effect, failure.effect)
        self.cluster.advance(self.cluster.now + self.cluster.seconds[f"notice {effect}"])
        self.check()

    def check(self) -> None:
        """Raise RankLostError if a rank is gone."""
        if lost := [rank for rank, actor in enumerate(self.actors) if not actor.is_alive]:
            self.lost = lost
            error = RankLostError(f"ranks {lost[:3]} of policy are gone")
            error.who = "a rank"
            raise error


def wait_for(asked: Sequence[Any], *, phase: str, deadline_s: float, whose: Any, ranks: Any = None) -> list[Any]:
    """`megarl.workers.group.wait_for`: the first failure ends the wait."""
    answers = []
    for one in asked:
        cluster = one.actor.cluster
        try:
            answers.append(cluster.get(one, deadline_s))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(f"phase '{phase}' was not done") from None
        except ray.exceptions.RayActorError:
            if isinstance(whose, Group):
                whose.check()
            raise WorkerError(f"a process of phase '{phase}' is gone") from None
    return answers


@dataclass(frozen=True)
class Spares:
    """Ray's reservation of places; those of lost replicas are not waited for, and have nodes one by one."""

    cluster: Cluster
    number: int

    def wait(self, timeout_seconds: float) -> bool:
        """Reserve spare nodes; return whether there was room."""
        cluster, number = self.cluster, self.number
        if fits := len(cluster.free) >= number:
            cluster.reserved, cluster.free = cluster.free[:number], cluster.free[number:]
        return fits


@contextlib.contextmanager
def in_place_of_ray(cluster: Cluster) -> Iterator[None]:
    """Have the option call this cluster."""

    actor_class = SimpleNamespace(
        options=lambda **where: SimpleNamespace(remote=lambda *arguments: Actor(cluster, where["place"]))
    )
    memory_class = SimpleNamespace(
        options=lambda scheduling_strategy: SimpleNamespace(remote=lambda name: NodeMemory(cluster, scheduling_strategy))
    )
    with contextlib.ExitStack() as stack:
        for module in (memory, places, recovery):
            stack.enter_context(mock.patch.object(module, "ray", cluster))
        for module in (memory, recovery):
            stack.enter_context(mock.patch.object(module, "wait_for", wait_for))
        for module, name, stand_in in (
            (memory, "NodeAffinitySchedulingStrategy", lambda node, soft: node),
            (memory, "NodeMemoryActor", memory_class),
            (places, "placement_group", lambda bundles, strategy: Spares(cluster, len(bundles))),
            (places, "remove_placement_group", lambda spares: cluster.release()),
            (places, "RankActor", actor_class),
            (places, "time", SimpleNamespace(monotonic=lambda: cluster.now)),
            (recovery, "time", SimpleNamespace(perf_counter=lambda: cluster.now)),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def replacement(
    cluster: Cluster, layout: Layout, spares: int, *, shrink: bool, whole: Layout | None = None
) -> tuple[recovery.RankReplacement, Group]:
    """megarl's own recovery of a run whose ranks have every place. Engines share them, so spares have no processes.

    `whole`: the layout of the run's config, where it started again with fewer replicas than that has.

    Raises:
        ClusterError: there is no room for so many spares.
    """
    from megarl.config import parse_config

    resources = {"spares": spares, "shrink": shrink and layout.dp > 1}
    tree = {"run": {"folder": "."}, "model": {"path": "m"}, "rewards": [{"name": "exact_number"}], "resources": resources}
    tree |= {
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
        "policy": {"layout": asdict(whole or layout)},
        "rollout": {"prompts_per_step": (whole or layout).dp},
    }
    actors = [Actor(cluster, number) for number in range(layout.world_size)]
    for actor in actors:
        actor.started_s = cluster.now
    group = Group(cluster, layout, actors)
    bundles = tuple(Bundle(str(actor.node), 0) for actor in actors)
    of_run = SimpleNamespace(
        placement=Placement(bundles, {"policy": tuple(range(layout.world_size))}, ()),
        platform=SimpleNamespace(name="cuda"),
        threads_of=lambda name: 1,
        where=lambda number, threads: {"place": number, "num_cpus": 1, "num_gpus": 1},
        reservations=[],
        log_folder="",
        architecture=None,
        start_deadline_s=300.0,
    )
    updates = SimpleNamespace(machines=None, connected=[], under_way=())
    rollouts = SimpleNamespace(updates=updates, version=0, stale=False)
    roles = SimpleNamespace(
        groups={"policy": group},
        loaded=["policy"],
        changing=lambda: ["policy"],
        group_of=lambda role: group,
        ask=lambda role, question: [0] * group.layout.world_size,
        load=lambda role: group.work("load weights"),
    )
    cluster.group = group
    spare = places.Places(of_run, spares, shared=True)  # type: ignore[arg-type]
    made = recovery.RankReplacement(parse_config(tree), of_run, spare, roles, rollouts)  # type: ignore[arg-type]
    cluster.memory = made._memory
    return made, group


def run_of(step: int) -> Any:
    """What recovery asks a run for and tells it."""
    state = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    return SimpleNamespace(
        step=step,
        guards=SimpleNamespace(rollbacks=0),
        progress=SimpleNamespace(say=lambda line: None),
        saving=SimpleNamespace(give_up=lambda: None),
        watching=SimpleNamespace(ranks={}),
        experience=state,
        parts=[],
        session=SimpleNamespace(step=step),
        rollouts=SimpleNamespace(stale=False),
        scored_greedy=[],
        experts=SimpleNamespace(begin_step=lambda: None),
        metrics={},
    )
