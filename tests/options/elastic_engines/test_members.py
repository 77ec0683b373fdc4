"""Engines come and go ten times, by the scheduler on engines of its test's own and nodes that are only told: every prompt is
trained once, and what an engine that leaves has said is trained, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megarl.config import Config, parse_config
from megarl.core.staleness_manager import StalenessManager
from megarl.errors import ClusterError, EngineError
from megarl.options.elastic_engines import members, peers, requests
from megarl.options.elastic_engines.members import EngineMembers, Member
from megarl.options.elastic_engines.places import EnginePlaceFound, Nodes
from megarl.rollout.scheduling.engine_state import EngineState
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.workers.rollouts import GRACE_S
from tests.options.lending.test_lent_engines import told_and_kept
from tests.rollout.fake_engines import Source, check_prompts
from tests.rollout.test_partial_groups import Book, ContinuingEngine, asking, check_sample

LEAST, MOST, TIMES = 1, 2, 10
WAIT_S = 60.0
START = EngineMembers._start


class Site:
    """The nodes that there are, and the run's side of them: what `Rollouts` and Ray would be."""

    def __init__(self, config: Config, scheduler: Scheduler) -> None:
        self.config, self.scheduler, self.book = config, scheduler, Book()
        self.names: dict[str, str] = {}
        self.draining: set[str] = set()
        self.said: list[str] = []
        self.engines: list[Any] = []
        self.version, self.threads = 0, 1
        self.updates = SimpleNamespace(under_way=(), forget=lambda number: None)
        self.made: list[ContinuingEngine] = []
        self.running: Any = None

    def add(self) -> str:
        """A node with room for one engine."""
        node = f"node-{len(self.made)}-{len(self.names)}-{time.monotonic_ns()}"
        self.names = self.names | {node: f"at {node}"}
        return node

    def remove(self, node: str) -> None:
        """End a node, and the engine there, at once."""
        self.names = {other: name for other, name in self.names.items() if other != node}
        for engine in self.made:
            engine.is_dead = engine.is_dead or engine.number == node

    @property
    def there(self) -> list[EngineState]:
        return [state for state in self.scheduler.engines if not state.is_absent]

    def wait_for(self, count: int) -> None:
        """Wait until so many engines are there."""
        ends_at = time.monotonic() + WAIT_S
        while len(self.there) != count:
            assert time.monotonic() < ends_at, self.said
            time.sleep(0.005)

    def update(self, version: int) -> None:
        """Give engines new weights, as the driver does."""
        self.version = version
        behind = [state.number for state in self.scheduler.engines if state.is_up and state.version != version]
        self.give(behind, version)

    def give(self, numbers: list[int], version: int) -> None:
        self.updates.under_way = tuple(numbers)
        self.scheduler.hold(numbers)
        for number in numbers:
            self.engines[number].version = None
        time.sleep(0.005)
        for number in numbers:
            self.engines[number].version = version
            if self.engines[number].is_dead:
                self.scheduler.fail(number, EngineError("it is gone"))
        self.scheduler.resume([number for number in numbers if not self.engines[number].is_dead], version)
        self.updates.under_way = ()

    def batch(self) -> list[list[Any]]:
        """Take the batch that is due."""
        while not self.scheduler.wait(WAIT_S):
            if numbers := self.scheduler.without_weights:
                self.give(numbers, self.version)
            time.sleep(0.002)
        return self.scheduler.pop_batch().samples


class Places:
    """A place on every node."""

    def __init__(self, cluster: Any, size: int) -> None:
        self.held: set[str] = set()
        self.wants = False

    def seek(self) -> None:
        self.wants = True

    def found(self, nodes: Nodes) -> EnginePlaceFound | None:
        free = [node for node in nodes.names if node not in self.held]
        if not self.wants or not free:
            return None
        self.wants = False
        self.held.add(free[0])
        return EnginePlaceFound(free[0], free[0], nodes.names[free[0]])  # type: ignore[arg-type]

    def give_back(self, at: EnginePlaceFound) -> None:
        self.held.discard(at.node_id)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    task = {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}
    tree: dict[str, Any] = {
        "run": {"folder": str(tmp_path)}, "model": {"path": "m"}, "data": {"train": task},
        "rewards": [{"name": "exact_number"}], "resources": {"placement": "separate"},
        "rollout": {"engine": "embedded", "engines": {"min": LEAST, "max": MOST}},
    }  # fmt: skip
    config = parse_config(tree)
    Path(config.run_folder).mkdir(parents=True)
    manager = StalenessManager(6, 1)
    ask = asking(episodes=False)
    scheduler = Scheduler([], manager, ask, cuts=True, keeps_turns=True, dispensable=range(MOST), groups_per_engine=4)
    made = Site(config, scheduler)

    def start(_: EngineMembers, member: Member) -> int | None:
        engine = ContinuingEngine(member.place.node_id, made.book, lambda: 0.03)  # type: ignore[arg-type]
        engine.version = made.version if made.version == 0 else None
        made.made.append(engine)
        member.actor = engine
        return engine.version

    def copy(rollouts: Any, source: EngineState, actor: Any, version: int) -> bool:
        giver = rollouts.engines[source.number]
        time.sleep(0.005)
        actor.version = giver.version
        return bool(actor.version == version)

    def kill(_: EngineMembers, member: Member) -> None:
        if member.actor is not None:
            member.actor.is_dead = True

    stand_in = SimpleNamespace(get=lambda *_, **__: None, kill=lambda *_, **__: None, exceptions=ray.exceptions)
    ContinuingEngine.stop = SimpleNamespace(remote=lambda: None)  # type: ignore[attr-defined]
    for name, value in {
        "EnginePlaces": Places, "ray": stand_in, "KeptAnswers": lambda actor, number: actor, "LOOK_S": 0.01, "SOON_S": 0.01,
        "check_engine": lambda *_: SimpleNamespace(give_weights=None),
    }.items():  # fmt: skip
        monkeypatch.setattr(members, name, value)
    monkeypatch.setattr(Nodes, "now", lambda: Nodes(dict(made.names), frozenset(made.draining & made.names.keys())))
    monkeypatch.setattr(EngineMembers, "_start", start)
    monkeypatch.setattr(EngineMembers, "_kill", kill)
    monkeypatch.setattr(peers, "_copy", copy)
    cluster: Any = SimpleNamespace(platform=SimpleNamespace(name="cpu"))
    made.running = running = EngineMembers(config, cluster, made, made.said.append)  # type: ignore[arg-type]
    made.add()
    running.wait_for_first()
    yield made
    del ContinuingEngine.stop  # type: ignore[attr-defined]
    running.close()
    scheduler.close()


def leave_as_asked(site: Site, node: str) -> None:
    requests.ask_to_leave(Path(site.config.run_folder), node, WAIT_S)
    site.remove(node)


def drain(site: Site, node: str) -> None:
    site.draining.add(node)
    site.wait_for(MOST - 1)
    site.remove(node)


def lose(site: Site, node: str) -> None:
    site.remove(node)
    site.wait_for(MOST - 1)


def test_engines_come_and_go_ten_times_and_every_prompt_is_trained_once(site: Site) -> None:
    source, seen, trained = Source(), list[int](), set[int]()
    ways: list[Callable[[Site, str], None]] = [leave_as_asked, drain, lose]
    worked = 0
    for version in range(2 * TIMES + 2):
        site.update(version)
        site.scheduler.open_step(version, source)
        if version % 2 == 1 and version < 2 * TIMES:
            site.add()
            site.wait_for(MOST)
            assert [(state.version, site.engines[state.number].version) for state in site.there] == [(version, version)] * 2
        elif version:
            newest = site.made[-1]
            worked += bool(newest.answered)
            gone = site.made[-1] if version % 4 else next(engine for engine in site.made if not engine.is_dead)
            if len(site.there) == MOST:
                ways[version // 2 % 3](site, gone.number)  # type: ignore[arg-type]
        for group in site.batch():
            seen.append(int(group[0].group_id[1:]))
            for sample in group:
                check_sample(sample, site.book)
                trained |= {token for token in sample.response_ids if token > 0}
                assert version - 1 <= sample.weight_versions[0] <= sample.weight_versions[-1] <= version
        assert site.scheduler.partial.aborted_tokens == 0
        assert site.book.told - trained <= told_and_kept(site.scheduler), "what engines have said is trained, or kept"
    check_prompts(site.scheduler, source, seen, len(seen))
    assert len(site.made) == 1 + TIMES
    assert worked > 0, "which of them are asked before they leave is a matter of time"
    assert site.scheduler.manager.suspended > 0, "some was handed over"
    assert sum("from engine" in line for line in site.said) == TIMES


def test_below_the_minimum_the_run_waits_and_goes_on_when_an_engine_comes(site: Site) -> None:
    source = Source()
    site.update(0)
    site.scheduler.open_step(0, source)
    site.remove(site.made[0].number)  # type: ignore[arg-type]
    site.wait_for(0)
    ends_at = time.monotonic() + WAIT_S
    while not site.scheduler.is_short:
        assert time.monotonic() < ends_at
        time.sleep(0.005)
    assert site.scheduler.wait(WAIT_S) is False
    site.add()
    assert len(site.batch()) == 6
    waits = f"0 engines are there, of the {LEAST} that rollout.engines asks for: the run waits"
    assert [line for line in site.said if "there" in line] == [waits, "1 engine is there: the run goes on"]


@pytest.mark.parametrize("under_way", ["download", "with_gpus"])
def test_an_engine_that_starts_while_the_run_ends_is_not_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch, under_way: str
) -> None:
    """Its actor is not there yet when the run looks for engines that start."""
    running, made, waited = site.running, list[Any](), list[Any]()
    begun, is_given_back, shuts_down = (threading.Event() for _ in range(3))
    give_back, shut_down = running._places.give_back, running._pool.shutdown

    def download(*_: Any) -> None:
        begun.set()
        if is_given_back.wait(WAIT_S / 4):
            raise ray.exceptions.WorkerCrashedError

    def with_gpus(at: EnginePlaceFound) -> EnginePlaceFound:
        begun.set()
        shuts_down.wait(WAIT_S)
        return at

    def make(*_: Any, **__: Any) -> Any:
        made.append(SimpleNamespace(start=SimpleNamespace(remote=lambda version: None), is_dead=False))
        return made[-1]

    def now_given_back(at: EnginePlaceFound) -> None:
        give_back(at)
        is_given_back.set()

    def now_shut_down(**how: bool) -> None:
        shuts_down.set()
        shut_down(**how)

    monkeypatch.setattr(EngineMembers, "_start", START)
    monkeypatch.setattr(members, "download_on_nodes", download)
    monkeypatch.setattr(members, "EngineActor", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make)))
    monkeypatch.setattr(members.ray, "get", lambda *_, timeout: waited.append(timeout))
    models = ["m"] if under_way == "download" else []
    running._cluster = SimpleNamespace(
        models=models, address="a", platform=SimpleNamespace(name="cpu"), log_folder="logs", architecture=None
    )
    running._kind = SimpleNamespace(give_weights=None, options=lambda *_: {})
    for name, value in {
        "where": lambda *_: {}, "bundles": lambda at: [], "with_gpus": with_gpus, "give_back": now_given_back,
    }.items():  # fmt: skip
        monkeypatch.setattr(running._places, name, value, raising=False)
    monkeypatch.setattr(running._pool, "shutdown", now_shut_down)
    site.add()
    assert begun.wait(WAIT_S)
    running.close()
    assert is_given_back.is_set()
    assert waited == []
    assert [actor.is_dead for actor in made] == ([] if under_way == "download" else [True])


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (["there"], "the Ray cluster has had room for 1 engine beside the ranks"),
        (["there", "starting"], "1 engine had not started; look at their logs"),
        (["starting", "starting", "gone"], "2 engines had not started"),
    ],
)
def test_a_run_that_does_not_start_says_whether_engines_have_no_place_or_take_too_long(stages: list[str], said: str) -> None:
    members = object.__new__(EngineMembers)
    members._least, members._error = 2, None
    members._config = SimpleNamespace(resources=SimpleNamespace(deadlines=SimpleNamespace(start_s=-GRACE_S)))  # type: ignore[assignment]
    members._rollouts = SimpleNamespace(scheduler=SimpleNamespace(is_short=True))  # type: ignore[assignment]
    members._members = {number: SimpleNamespace(stage=stage) for number, stage in enumerate(stages)}  # type: ignore[misc]
    with pytest.raises(ClusterError, match=f"rollout.engines is 2, but after 0 s {said}"):
        members.wait_for_first()
