"""Replaces ranks whose processes are lost: the others stay, state comes from memory, and the step is computed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from megarl.config import AnyConfig, Config
from megarl.config.layout import Layout
from megarl.core.steps import RlRun
from megarl.errors import DeadlineError, RankLostError, WorkerError, counted
from megarl.option_list import functions
from megarl.options.elastic.comparison import begin_watch, differing, end_watch
from megarl.options.elastic.memory import LOOK_S, Memory, Moment
from megarl.options.elastic.places import FAULTY_AFTER, Places
from megarl.options.elastic.rank_process import Become, interrupt, leave
from megarl.options.elastic.replicas import Replicas, fitting, what_lacks
from megarl.options.elastic.section import compared_every, shrinks, spares_of
from megarl.supervise.child_run import is_restart
from megarl.weights.machines import Machines
from megarl.weights.placement import PlacementRequest
from megarl.workers.cluster import Cluster
from megarl.workers.group import WorkerGroup, wait_for
from megarl.workers.roles import Roles
from megarl.workers.rollouts import Rollouts
from megarl.workers.weight_updates import ABANDON_S

if TYPE_CHECKING:
    from megarl.megatron.rank_model import RankModel

T = TypeVar("T")
LEAVE_S = 20.0
"""For ranks to leave a world that has lost some: what they compute ends when others have left."""
SHRINK_S = 15.0
"""For Ray to find another place for a rank, before a run that may goes on with fewer replicas."""
MOST_LOSSES = 3
"""Losses in a row that one step may have."""


class RankReplacement:
    """The `Recovery` of a run."""

    def __init__(self, config: Config, cluster: Cluster, places: Places, roles: Roles, rollouts: Rollouts) -> None:
        self._cluster, self._places, self._roles, self._rollouts = cluster, places, roles, rollouts
        self._deadlines, self._seed = config.resources.deadlines, config.run.seed
        self._replaced, self._seconds = 0, 0.0
        self._compare_every = compared_every(config.resources)
        self._damaged: dict[str, set[int]] = {}
        """By group the ranks that differed from other replicas, until they are replaced."""
        self._late: dict[str, set[int]] = {}
        """By group the ranks whose new processes did not come, as their node was lost, until they are replaced elsewhere."""
        self._shrinks = shrinks(config.resources)
        self._whole: dict[str, Replicas] = {}
        """By group that has fewer replicas those of its own layout."""
        for name, layout in config.layouts.items():
            if roles.groups[name].layout.dp < layout.dp:  # the run has started again, with places for fewer
                self._whole[name] = places.seek_replicas(self._groups()[name], layout)
        self._memory = Memory(roles, self._deadlines.save_s)
        self._memory.find_nodes()
        self._memory.check_room()

    def attempts(self, run: RlRun) -> Iterator[AbstractContextManager[None]]:
        """Attempts at the part of a step in which ranks compute, until one is not cut short by a loss."""
        self._memory.begin(_moment(run))
        self._memory.finish()
        cost = {f"recovery/{name}": value for name, value in asdict(self._memory.cost).items()}
        self.again(run, partial(self._grow, run))
        self.again(run, partial(self._compare, run, begin_watch))
        put_back = _remembered(run)
        for number in range(MOST_LOSSES + 1):
            errors: list[RankLostError] = []
            yield _caught(errors, last=number == MOST_LOSSES)
            if not errors:
                with _caught(errors, last=number == MOST_LOSSES):
                    self._compare(run, end_watch)
                    self._memory.begin((run.step + 1, run.guards.rollbacks))
            if not errors:
                break
            self._recover(errors[0], run)
            put_back()
            self._compare(run, begin_watch)
        run.metrics |= {"recovery/replaced_ranks": self._replaced, "recovery/seconds": self._seconds} | cost
        self._seconds = 0.0

    def again(self, run: RlRun, work: Callable[[], T]) -> T:
        """Do `work`, which leaves ranks as they are and may be done again."""
        try:
            return work()
        except RankLostError as error:
            self._recover(error, run)
            return work()

    def _recover(self, error: RankLostError, run: RlRun) -> None:
        """Replace what is lost, and put every role back to this moment of the run.

        Raises:
            RankLostError: `error`, as this moment is not in memory.
            WorkerError: the new world did not come up.
        """
        began = time.perf_counter()
        groups = self._groups()
        self._memory.finish_soon()
        if self._memory.kept is None or self._memory.kept.moment != _moment(run) or not self._memory.look():
            raise error
        lost = sum(len(group.lost) for group in groups.values())
        run.progress.say(f"{counted(lost, 'rank')} lost ({error.who}): replaced, and the step is computed again from memory")
        run.saving.give_up()
        for number in range(MOST_LOSSES + 1):
            try:
                lossy = [group for group in groups.values() if group.lost]
                for group in lossy:
                    self._replace(group, run.progress.say)
                self._bring_up(run, lossy)
                break
            except RankLostError:
                if number == MOST_LOSSES or not self._memory.look():
                    raise
        self._reconnect()
        seconds = time.perf_counter() - began
        self._replaced, self._seconds = self._replaced + lost, self._seconds + seconds
        run.progress.say(f"the ranks are there again after {seconds:.1f} s")

    def _compare(self, run: RlRun, digests: Callable[[RankModel], list[tuple[int, int]]]) -> None:
        """Compare what ranks answer to `digests` between the replicas of every role that is trained, where it is time.

        Raises:
            RankLostError: some differ; they are to be replaced, at other places where there are spares.
        """
        if not self._compare_every or (run.step + 1) % self._compare_every:
            return
        for role in self._roles.changing():
            group = self._roles.group_of(role)
            assert isinstance(group, WorkerGroup)
            answers = zip(*self._roles.ask(role, digests), strict=True)
            if found := sorted({rank for one in answers for rank in differing(group.layout, one)}):
                group.lost = found
                self._damaged[group.name] = {*found}
                where = ", ".join(f"rank {rank} on {group.host_and_pid[rank][0]}" for rank in found)
                said = f"weights of {role} differ between replicas at step {run.step + 1}: {where}"
                raise _lost(said, f"{where}: weights of {role} that differ from other replicas'")

    def _reconnect(self) -> None:
        """Have engines connected anew at the next update; one that was under way is given up."""
        updates, at = self._rollouts.updates, self._cluster.placement
        assert updates is not None, "weights come from roles"
        updates.machines = Machines.of(at) if len(at.machines) > 1 else None
        for engine in [*updates.connected]:
            updates.forget(engine)
        if updates.under_way:
            updates.scheduler.on_each(
                updates.under_way, lambda _, engine: engine.abandon_update(deadline_s=ABANDON_S), ABANDON_S
            )
            updates.under_way = ()
            self._rollouts.version, self._rollouts.stale = self._rollouts.version - 1, True

    def _groups(self) -> dict[str, WorkerGroup]:
        return {name: group for name, group in self._roles.groups.items() if isinstance(group, WorkerGroup)}

    def _bring_up(self, run: RlRun, groups: Sequence[WorkerGroup]) -> None:
        """Have the processes of these groups be their ranks, and every role as it is in memory."""
        for group in groups:
            threads = self._cluster.threads_of(group.name)
            become = [
                actor.__ray_call__.remote(Become(group.log_folder, group.name, rank, group.layout, threads))
                for rank, actor in enumerate(group.actors)
            ]
            try:
                wait_for(become, phase="replacement", deadline_s=self._deadlines.start_s, whose=group)
            except DeadlineError as error:
                answered = ray.wait(become, num_returns=len(become), timeout=0)[0]
                group.lost = [rank for rank, asked in enumerate(become) if asked not in answered]
                self._late[group.name] = {*group.lost}
                ours = RankLostError(str(error))
                ours.who = error.who
                raise ours from error
            group.connect(seed=self._seed, deadline_s=self._deadlines.start_s)
        for role in self._roles.loaded:
            if self._roles.group_of(role) in groups:
                self._roles.load(role)
        self._memory.put_back()
        for group in groups:
            group.lost = []
        run.watching.ranks = {name: group.states for name, group in self._roles.groups.items()}

    def _replace(self, group: WorkerGroup, say: Callable[[str], None]) -> None:
        """Have a process for every rank of the group, none of which is in a world."""
        lost = {*group.lost}
        lost |= _stuck({rank: actor for rank, actor in enumerate(group.actors) if rank not in lost})
        late, damaged = self._late.pop(group.name, set()), self._damaged.pop(group.name, set())
        there = {rank: rank not in late and self._memory.is_there(group.name, rank) for rank in sorted(lost)}
        before = len(self._places.put_aside)
        homeless = self._places.replace(group, there, damaged, SHRINK_S if self._shrinks else self._deadlines.start_s)
        for at in self._places.put_aside[before:]:
            say(f"GPU {at.gpu} of {at.node} has lost {FAULTY_AFTER} ranks, though its node answers: no spare starts there")
        if homeless and not self._shrinks:
            raise WorkerError(f"there is no place for {counted(len(homeless), 'rank')} of {group.name} whose nodes are lost")
        if homeless:
            self._shrink(group, homeless)

    def _shrink(self, group: WorkerGroup, homeless: Sequence[int]) -> None:
        """Have the group be the replicas that have all of their ranks, or as many of them as its layout can do with."""
        placement = self._cluster.placement
        own = dict(zip(placement.ranks[group.name], group.actors, strict=True))
        replicas = Replicas.of(group.layout, [*own], lambda at: placement.bundles[at].node)
        largest = replicas.largest({number for rank, number in enumerate(own) if rank not in homeless})
        if largest is None:
            raise WorkerError(f"of {group.name} no replica is left that has all of its ranks")
        self._whole.setdefault(group.name, replicas)
        self._arrange(group, *largest, own)

    def _arrange(self, group: WorkerGroup, layout: Layout, places: Sequence[int], processes: Mapping[int, Any]) -> None:
        """Have the processes at these places, by number, be the ranks of a layout; ranks at other places are ended."""
        before = {number: rank for rank, number in enumerate(self._cluster.placement.ranks[group.name])}
        for number in before.keys() - {*places}:
            ray.kill(group.actors[before[number]], no_restart=True)
        self._memory.renumber(group.name, [before.get(number) for number in places])
        self._places.assign(group.name, places)
        group.regroup(layout, [processes[number] for number in places])

    def _grow(self, run: RlRun) -> None:
        """Have groups that lost replicas have as many again as there are places for."""
        grown = []
        for name, replicas in [*self._whole.items()]:
            group = self._groups()[name]
            own = dict(zip(self._cluster.placement.ranks[name], group.actors, strict=True))
            if _answering(own) != own:
                continue  # some are lost, which this attempt finds
            found = self._places.found(group, [number for number in replicas.places if number not in own])
            ready = _answering(found)
            self._places.take(group, found.keys() - ready.keys())
            there = own | ready
            replicas.put_together(there)
            largest = replicas.largest(there)
            if largest is None or largest[0].dp <= group.layout.dp:
                continue
            if stuck := _stuck(own):
                group.lost = [rank for rank, number in enumerate(own) if number in stuck]
                said = f"ranks {group.lost} of {name} did not leave their world within {LEAVE_S:.0f} s"
                raise _lost(said, f"ranks {group.lost} of {name}, which did not leave the world of fewer replicas")
            layout, places = largest
            self._places.take(group, [number for number in places if number in ready])
            self._arrange(group, layout, places, there)
            grown.append(group)
            if layout == replicas.layout:
                del self._whole[name]
                run.progress.say(f"all ranks of {name} have places again")
            else:
                run.progress.say(f"{layout.dp} of {replicas.layout.dp} replicas of {name} have places again")
        if grown:
            self._bring_up(run, grown)
            self._reconnect()


def _lost(said: str, who: str) -> RankLostError:
    error = RankLostError(said)
    error.who = who
    return error


def _stuck(actors: Mapping[int, Any]) -> set[int]:
    """Have processes leave their worlds; those that do not."""
    for actor in actors.values():
        actor.__ray_call__.options(concurrency_group="control").remote(interrupt)
    left = {number: actor.__ray_call__.remote(leave) for number, actor in actors.items()}
    ray.wait([*left.values()], num_returns=len(left), timeout=LEAVE_S)
    stuck = set()
    for number, answer in left.items():
        try:
            ray.get(answer, timeout=0)
        except (ray.exceptions.RayError, TimeoutError):
            stuck.add(number)
    return stuck


def _answering(actors: Mapping[int, Any]) -> dict[int, Any]:
    """Restrict to processes that are there; they do nothing else."""
    asked = {number: actor.__ray_call__.remote(_nothing) for number, actor in actors.items()}
    if asked:
        ray.wait([*asked.values()], num_returns=len(asked), timeout=LOOK_S)
    there = {}
    for number, answer in asked.items():
        with suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(answer, timeout=0)
            there[number] = actors[number]
    return there


def _nothing(process: object) -> None:
    """Do nothing."""


@contextmanager
def _caught(errors: list[RankLostError], *, last: bool) -> Iterator[None]:
    try:
        yield
    except RankLostError as error:
        if last:
            raise
        errors.append(error)


def _remembered(run: RlRun) -> Callable[[], None]:
    """The function that puts back what an attempt changes in the driver."""
    state = deepcopy((run.experience.state_dict(), [part.state_dict() for part in run.parts]))
    step, stale, greedy = run.session.step, run.rollouts.stale, run.scored_greedy

    def put_back() -> None:
        experience, of_parts = deepcopy(state)
        run.experience.load_state_dict(experience)
        for part, of_part in zip(run.parts, of_parts, strict=True):
            part.load_state_dict(of_part)
        run.session.step, run.rollouts.stale, run.scored_greedy = step, stale, greedy
        run.experts.begin_step()

    return put_back


def _moment(run: RlRun) -> Moment:
    return run.step, run.guards.rollbacks


def placed_fewer(config: AnyConfig) -> Callable[[PlacementRequest, int], PlacementRequest | None] | None:
    """The function by which a run that starts again goes on with less than all of it; None where it does not."""
    if not (shrinks(config.resources) and is_restart()):
        return None
    return None if any(needs(config) for needs in functions("questions", "needs_all_places")) else fitting


def start_spares(
    config: Config, cluster: Cluster, say: Callable[[str], None] | None
) -> Callable[[Roles, Rollouts], RankReplacement] | None:
    """Reserve what `resources.spares` asks for, and start it; answers the function that makes the run's `RankReplacement`.

    None where lost ranks are not replaced. What has no place, of a run that starts again, comes before spares.
    """
    number = spares_of(config.resources)
    if number is None:
        return None
    shared, may_be_fewer = config.resources.placement == "colocated", shrinks(config.resources) and is_restart()
    if lacking := what_lacks(cluster.asked, cluster.wanted):
        number = 0
        if say is not None:
            say(f"the Ray cluster has places for {lacking}; the run goes on with these")
    places = Places(cluster, number, shared=shared, may_be_fewer=may_be_fewer)
    return partial(RankReplacement, config, cluster, places)
