"""The engines of a run that come and go: each has a number and a place, and is there from its first weights until it leaves.

A thread looks at nodes, requests and engines. It alone changes who is a member; what takes long (an engine starts, or hands
over what it works on) is done by others, which tell it by the member's `stage`. What the scheduler has of an engine is changed
in the scheduler's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray

from megarl.config import Config
from megarl.config.engine_kinds import capabilities_of
from megarl.errors import ClusterError, EngineError, MegarlError, WorkerError, counted
from megarl.options.elastic_engines import requests
from megarl.options.elastic_engines.kept_answers import KeptAnswers
from megarl.options.elastic_engines.peers import POLL_S, newest_weights
from megarl.options.elastic_engines.places import EnginePlaceFound, EnginePlaces, Nodes
from megarl.options.elastic_engines.section import max_engines_of, sites_of
from megarl.rollout.engines.protocol import Engine, EnginePlace
from megarl.rollout.engines.registry import check_engine, engine_path
from megarl.rollout.scheduling.engine_order import CAPACITY_S
from megarl.rollout.scheduling.engine_state import EngineState
from megarl.rollout.scheduling.scheduler import CUT_S
from megarl.workers.cluster import Cluster, EngineActor
from megarl.workers.engine_actor import STOP_S
from megarl.workers.engine_calls import EngineCalls
from megarl.workers.node_models import download_on_nodes
from megarl.workers.rollouts import GRACE_S, Rollouts

LOOK_S, SOON_S = 1.0, 0.1
"""Between two looks at nodes and engines; until the first engines are there, and behind one that was given a place."""
TRIES = 2
"""Starts of an engine at a place, before the place is left empty."""
AT_ONCE = 16
"""Engines that start or leave at the same time."""

MemberStage = Literal["starting", "there", "leaving", "gone", "failed"]


@dataclass
class Member:
    """An engine that is there, or is starting or leaving, under a number that it has as long as it is a member."""

    number: int
    place: EnginePlaceFound
    actor: Any = None
    stage: MemberStage = "starting"


class EngineMembers:
    """Starts engines wherever Ray has room, at most as many as the config says, and lets them go."""

    def __init__(self, config: Config, cluster: Cluster, rollouts: Rollouts, say: Callable[[str], None] | None) -> None:
        """The first engines start at once, while ranks do."""
        self._config, self._cluster, self._rollouts = config, cluster, rollouts
        self._say = say or (lambda line: None)
        self._least, self._most = config.rollout.engines, max_engines_of(config.rollout) or 0
        self._able = capabilities_of(config.rollout)
        self._kind = check_engine(config, cluster.platform.name)
        self._folder = Path(config.run_folder)
        self._places = EnginePlaces(cluster, config.rollout.tp)
        self._members: dict[int, Member] = {}
        self._empty: list[EnginePlaceFound] = []
        """Places that no engine is to have: one failed there, or their node leaves."""
        self._leaving: set[str] = set()
        self._has_begun = self._has_placed = False
        self._told: Any = None
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="engine-member")
        scheduler = rollouts.scheduler
        scheduler.thread.run(self._make_numbers())
        self._far = self._open_to_sites()
        self._thread = threading.Thread(target=self._watch, name="engine-members", daemon=True)
        self._thread.start()

    def _open_to_sites(self) -> Any:
        """The engines of other sites (`FarMembers`); None: there are to be none."""
        if sites_of(self._config.rollout) is None:
            return None
        from megarl.options.elastic_engines.sites.far_members import FarMembers  # others need no server, and no zstandard

        return FarMembers(self._config, self._rollouts, self._most, self._members.keys, self._say)

    async def _make_numbers(self) -> None:
        scheduler = self._rollouts.scheduler
        scheduler.is_short = True
        for number in range(self._most):
            absent = EngineState(number, EngineCalls(None, number), is_dispensable=True, rests=True, is_absent=True)
            scheduler.engines.append(absent)
            self._rollouts.engines.append(None)

    def wait_for_first(self) -> None:
        """Wait until there are as many engines as there must be.

        Raises:
            ClusterError: there are not after `resources.deadlines.start_s`.
            MegarlError: one did not start, and there are not.
        """
        deadline_s = self._config.resources.deadlines.start_s + GRACE_S
        ends_at = time.monotonic() + deadline_s
        while self._rollouts.scheduler.is_short:
            if time.monotonic() > ends_at or self._error is not None:
                stages = Counter(member.stage for member in [*self._members.values()])
                placed = stages["there"] + stages["starting"]
                after = f"rollout.engines is {self._least}, but after {deadline_s:.0f} s"
                raise self._error or ClusterError(
                    f"{after} the Ray cluster has had room for {counted(placed, 'engine')} beside the ranks; use a cluster "
                    "with more nodes, or a smaller number"
                    if placed < self._least
                    else f"{after} {counted(stages['starting'], 'engine')} had not started; look at their logs, or set a "
                    "longer resources.deadlines.start_s"
                )
            time.sleep(POLL_S)
        self._has_begun = True

    def close(self) -> None:
        """Start and watch no engine any more; those that are there are the cluster's to end."""
        self._closing.set()
        self._thread.join()
        if self._far is not None:
            self._far.close()
        for member in [*self._members.values()]:
            if member.stage == "starting":
                self._kill(member)
                self._places.give_back(member.place)  # whoever waits for what is there hears of it
        self._pool.shutdown(cancel_futures=True)

    # who is there -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        is_silent = False
        while not self._closing.wait(LOOK_S if self._has_begun and not self._has_placed else SOON_S):
            try:
                self._look()
                is_silent = False
            except ray.exceptions.RayError as error:  # it may answer the next time
                if not is_silent:
                    self._say(f"Ray did not say which nodes there are: {error}")
                is_silent = True
            except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
                self._end_run(error)
                return

    def _end_run(self, error: Exception) -> None:
        self._error = self._error or error
        scheduler = self._rollouts.scheduler
        scheduler.thread.loop.call_soon_threadsafe(scheduler.give_up, error)

    def _look(self) -> None:
        nodes, asked = Nodes.now(), requests.asked_to_leave(self._folder)
        by_name = {name: node_id for node_id, name in nodes.names.items()}
        leaving = {by_name.get(node, node) for node in asked} | nodes.draining
        self._leaving |= leaving & nodes.names.keys()
        for member in [*self._members.values()]:
            self._see_to(member, nodes)
        for at in [at for at in self._empty if at.node_id not in nodes.names]:
            self._give_back(at)
        if self._far is not None:
            self._far.look(asked.keys(), self._let_go, self._lose_far)
        self._seek(nodes)
        self._settle()
        engines: list[dict[str, Any]] = [
            {
                "number": member.number,
                "node": nodes.names.get(at.node_id, at.node),
                "node_id": at.node_id,
                "stage": member.stage,
            }
            for member in self._members.values()
            for at in [member.place]  # whose node may be called otherwise by now
        ]
        far: list[dict[str, Any]] = self._far.told() if self._far is not None else []
        names = nodes.names | {one["node_id"]: one["node"] for one in far}
        if (told := (names, engines + far)) != self._told:
            requests.tell(self._folder, *told)
            self._told = told
        held = {member.place.node_id for member in self._members.values()} | {
            one[name] for one in far for name in ("node", "node_id")
        }
        for node, file in asked.items():
            if by_name.get(node, node) not in held:
                file.unlink(missing_ok=True)

    def _see_to(self, member: Member, nodes: Nodes) -> None:
        """Let go of a member that is lost or has left, and have it leave if its node does."""
        node_is_there = member.place.node_id in nodes.names
        state = self._rollouts.scheduler.engines[member.number]
        if member.stage == "there" and (not node_is_there or state.is_left_out):
            why = WorkerError(f"its node {member.place.node} is lost")
            self._rollouts.scheduler.thread.run(self._lose(state, why))
            self._kill(member)
            member.stage = "gone" if not node_is_there else "failed"
        elif member.stage == "there" and member.place.node_id in self._leaving:
            member.stage = "leaving"
            self._pool.submit(self._do, self._leave, member)
        if member.stage in ("gone", "failed"):
            del self._members[member.number]
            if member.stage == "failed" and node_is_there:
                self._empty.append(member.place)
            else:
                self._give_back(member.place)

    def _give_back(self, at: EnginePlaceFound) -> None:
        if at in self._empty:
            self._empty.remove(at)
        self._places.give_back(at)

    def _seek(self, nodes: Nodes) -> None:
        """Start an engine at the place that was sought, if Ray has found it, and ask for the next."""
        at = self._places.found(nodes)
        self._has_placed = at is not None
        elsewhere: set[int] = self._far.numbers if self._far is not None else set()
        sites = sites_of(self._config.rollout)
        most_here = self._most - max(len(elsewhere), sites.engines if sites is not None and self._far is not None else 0)
        has_room = len(self._members) < most_here
        if at is not None and at.node_id in self._leaving:
            self._empty.append(at)
        elif at is not None and not has_room:  # engines of other sites have come meanwhile
            self._places.give_back(at)
        elif at is not None:
            under_way = self._rollouts.updates.under_way if self._rollouts.updates is not None else ()
            free = {*range(self._most)} - self._members.keys() - elsewhere
            number = min(free, key=lambda number: (number in under_way, number))
            self._members[number] = member = Member(number, at)
            self._pool.submit(self._do, self._join, member)
        if len(self._members) < most_here:
            self._places.seek()

    def _settle(self) -> None:
        """Have the run wait while there are too few engines, and say so."""
        scheduler = self._rollouts.scheduler
        there = sum(member.stage == "there" for member in self._members.values())
        is_short = there < self._least
        if is_short == scheduler.is_short:
            return
        if self._has_begun:
            engines = f"{counted(there, 'engine')} {'is' if there == 1 else 'are'} there"
            needed = f"of the {self._least} that rollout.engines asks for"
            self._say(f"{engines}, {needed}: the run waits" if is_short else f"{engines}: the run goes on")

        async def set_short() -> None:
            scheduler.is_short = is_short
            scheduler.changed.set()
            scheduler.dispatch()

        scheduler.thread.run(set_short())

    # one comes ----------------------------------------------------------------------------------------------------

    def _do(self, work: Callable[[Any], None], member: Any) -> None:
        try:
            work(member)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            if not self._closing.is_set():
                self._end_run(error)

    def _join(self, member: Member) -> None:
        began = time.monotonic()
        for left in reversed(range(TRIES)):
            try:
                version, source = self._start(member), None
                if version != self._rollouts.version and self._kind.give_weights is not Engine.give_weights:
                    version, source = newest_weights(self._rollouts, member.actor, self._closing.is_set)
                break
            except (MegarlError, ray.exceptions.RayError) as error:
                self._kill(member)
                if self._closing.is_set():
                    return
                cause = getattr(error, "cause", None)
                why = f"engine {member.number} did not start on {member.place.node}: {cause or error}".partition("\n")[0]
                if not left:
                    self._say(f"{why}; its place is left empty")
                    self._error = self._error or (cause if isinstance(cause, MegarlError) else EngineError(why))
                    member.stage = "failed"
                    return
                self._say(f"{why}; it is started again")
        self._rollouts.scheduler.thread.run(self._admit(member, version), self._config.rollout.deadlines.update_s)
        member.stage = "there"
        if self._has_begun:
            whence = f" from engine {source}" if source is not None else ""
            weights = f"weights of version {version}{whence}" if version is not None else "no weights yet"
            self._say(f"engine {member.number} came on {member.place.node} after {time.monotonic() - began:.1f} s, {weights}")

    def _start(self, member: Member) -> int | None:
        """Start the engine; the version of the weights of the model's folder, if they are still of use."""
        cluster, threads = self._cluster, self._rollouts.threads
        if cluster.models and cluster.address:
            download_on_nodes(member.place.group, self._places.bundles(member.place), cluster.models)
        member.place = at = self._places.with_gpus(member.place)
        at_place = EnginePlace(member.number, threads, cluster.platform.name, Path(cluster.log_folder), at.gpus)
        options = self._kind.options(self._config, at_place)
        actor = EngineActor.options(**self._places.where(at, threads))
        path, model_path = engine_path(self._config.rollout), str(Path(self._config.model.path).resolve())
        member.actor = actor.remote(path, model_path, options, cluster.architecture, [], reachable=True)
        if self._closing.is_set():  # `close` may have looked for it before
            raise EngineError("the run ends")
        version = 0 if self._rollouts.version == 0 and not self._config.other_weights else None
        ray.get(member.actor.start.remote(version), timeout=self._config.resources.deadlines.start_s + GRACE_S)
        return version

    def _kill(self, member: Member) -> None:
        if member.actor is not None:
            ray.kill(member.actor, no_restart=True)

    async def _admit(self, member: Member, version: int | None) -> None:
        """In the loop: from now on the engine is one of the others, and is given work if its weights are the newest.

        Else the ranks give it weights with the next update, or when the driver next waits for samples.
        """
        rollouts, scheduler, number = self._rollouts, self._rollouts.scheduler, member.number
        handle = KeptAnswers(member.actor, number)
        state = EngineState(number, handle, keeps_turns=self._able.keeps_turns, is_dispensable=True)
        state.busy = scheduler.engines[number].busy
        if self._able.reports:
            with contextlib.suppress(MegarlError):
                state.capacity = await handle.capacity(deadline_s=CAPACITY_S)
        while rollouts.updates is not None and number in rollouts.updates.under_way:
            await asyncio.sleep(POLL_S)  # the engine that had the number before is counted out first
        if rollouts.updates is not None:
            rollouts.updates.forget(number)
        rollouts.engines[number] = member.actor
        state.version = version
        scheduler.engines[number] = state
        # whoever changes the version looks for the engines that need it afterwards: it was there by then, or is left without
        if version is not None and rollouts.version == version:
            state.is_open.set()
            scheduler.order.changed(state)
            scheduler.order.watch(state)
        else:
            state.version = None
        scheduler.changed.set()
        scheduler.dispatch()

    # one goes -----------------------------------------------------------------------------------------------------

    def _leave(self, member: Member) -> None:
        """Hand over what an engine works on, with what it has sampled, and end it."""
        scheduler, state = self._rollouts.scheduler, self._rollouts.scheduler.engines[member.number]
        self._say(f"engine {member.number} leaves {member.place.node}: what it works on goes on elsewhere")
        deadline_s = self._config.rollout.deadlines.update_s
        scheduler.thread.run(self._hand_over(state), deadline_s + 2 * CUT_S)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(member.actor.stop.remote(), timeout=STOP_S)
        self._kill(member)
        member.stage = "gone"

    def _let_go(self, engine: Any) -> None:
        """Have an engine of another site hand over what it works on, then end."""
        self._pool.submit(self._do, self._leave_site, engine)

    def _leave_site(self, engine: Any) -> None:
        if engine.state is not None:
            self._say(f"engine {engine.number} leaves {engine.site}: what it works on goes on elsewhere")
            deadline_s = self._config.rollout.deadlines.update_s
            self._rollouts.scheduler.thread.run(self._hand_over(engine.state), deadline_s + 2 * CUT_S)
        self._far.end(engine, "it has handed over what it worked on")

    def _lose_far(self, state: EngineState, error: Exception) -> None:
        self._rollouts.scheduler.thread.run(self._lose(state, error))

    async def _hand_over(self, state: EngineState) -> None:
        scheduler, updates = self._rollouts.scheduler, self._rollouts.updates
        ends_at = time.monotonic() + self._config.rollout.deadlines.update_s
        while updates is not None and state.number in updates.under_way and time.monotonic() < ends_at:
            await asyncio.sleep(POLL_S)
        state.is_absent = True  # if it fails now it is not started again
        if state.restarting is not None:
            state.restarting.cancel()
        await scheduler.vacate([state])

    async def _lose(self, state: EngineState, error: Exception) -> None:
        """In the loop: what an engine that is gone worked on goes to others."""
        state.is_absent = True
        if state.restarting is not None:
            state.restarting.cancel()
        if not state.is_left_out:  # else it has been told
            self._rollouts.scheduler.take_down(state, error)
        state.rests = True


def start(
    config: Config, cluster: Cluster, rollouts: Rollouts, say: Callable[[str], None] | None, stack: ExitStack
) -> EngineMembers | None:
    """Start the engines of a run whose engines come and go; None for any other. `stack` ends the watch over them."""
    if max_engines_of(config.rollout) is None:
        return None
    members = EngineMembers(config, cluster, rollouts, say)
    stack.callback(members.close)
    return members
