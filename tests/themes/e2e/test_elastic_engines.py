"""Runs whose engines come and go: newest weights from other engines, prompts each trained once, sampled tokens kept."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from megarl.cli.commands import main
from megarl.config import Config
from megarl.options.elastic_engines import requests
from megarl.rollout.engines.protocol import EngineRequest, Generation
from megarl.rollout.engines.stored_turns import SampledTurn, loaded
from megarl.rollout.scheduling.engine_state import EngineState
from megarl.trainers.rl.train import train
from megarl.weights.checksums import digest
from megarl.workers.rollouts import Rollouts
from tests.themes.e2e import slow_lent_engine
from tests.themes.e2e.test_async import drawn, groups, results

pytestmark = [pytest.mark.needs_option("elastic_engines"), pytest.mark.slow]
PROMPTS, STALENESS, COME_S = 4, 1, 120.0
LONG = 80
"""Tokens of responses that are still under way when an engine is asked to leave."""
SETTINGS: dict[str, Any] = {
    "data.eval": None,
    "run.log_samples": 1000,
    "resources.placement": "separate",
    "rollout.engine": f"{slow_lent_engine.__file__}:SlowEngine",
    "rollout.max_new_tokens": 10,
    "rollout.ignore_eos": True,
    "rollout.threads": 1,
    "rollout.schedule": {"mode": "async", "max_staleness": STALENESS},
    "algorithm.rollout_correction": {"mode": "tis_token"},
    "algorithm.kl": {"coef": 0.0},
}


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[Cluster]:
    """A Ray of a head without places, to which tests add nodes."""
    ray.shutdown()  # one that other tests share, which they begin anew
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as for a Ray that a run starts itself
    in_stores = {"max_direct_call_object_size": 100}  # what is smaller than 100 kB would be kept by the driver anyway
    head = {"num_cpus": 0, "object_store_memory": 10**8, "_system_config": in_stores}
    nodes = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)  # whose hooks want the main thread
    try:
        yield nodes
    finally:
        nodes.shutdown()
        monkeypatch.undo()


@pytest.fixture
def cluster(ray_nodes: Cluster) -> Iterator[Cluster]:
    """That Ray with a node for the rank; what the test adds is taken away again."""
    add(ray_nodes)
    yield ray_nodes
    ray.shutdown()
    for node in [*ray_nodes.worker_nodes]:
        ray_nodes.remove_node(node, allow_graceful=False)


def add(cluster: Cluster) -> str:
    """A node with room for an engine, or the rank; returns its id."""
    for _ in range(2):
        with contextlib.suppress(Exception):  # Ray gives it 30 s, which is little on a machine that is busy
            return str(cluster.add_node(num_cpus=1, object_store_memory=10**8).node_id)
    return str(cluster.add_node(num_cpus=1, object_store_memory=10**8).node_id)


def remove(cluster: Cluster, node_id: str) -> None:
    """End a node at once."""
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == node_id), allow_graceful=False)


class Script:
    """Does what a test says before some batches, while the engines work; `rollouts` is known by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Config, **acts: Callable[[Script], None]) -> None:
        """`acts`: by `before_3`, what is done before the third batch is waited for."""
        self.folder, self.asked = Path(config.run_folder), 0
        self.rollouts: Any = None
        self.failed: BaseException | None = None
        next_batch = Rollouts.next_batch

        def act_and_wait(rollouts: Rollouts, *arguments: Any) -> Any:
            self.rollouts, self.asked = rollouts, self.asked + 1
            if (act := acts.get(f"before_{self.asked}")) is not None:
                act(self)
            return next_batch(rollouts, *arguments)

        monkeypatch.setattr(Rollouts, "next_batch", act_and_wait)

    def engines(self, stage: str = "there") -> dict[int, str]:
        """The node ids of engines by number, as the run tells them."""
        told = requests.json.loads((self.folder / requests.ENGINES).read_text())["engines"]
        return {engine["number"]: engine["node_id"] for engine in told if engine["stage"] == stage}

    def wait_for(self, count: int) -> None:
        """Wait until so many engines are there."""
        ends_at = time.monotonic() + COME_S
        while len(self.engines()) != count:
            assert time.monotonic() < ends_at, self.engines()
            time.sleep(0.1)

    def weights(self) -> dict[int, tuple[int, dict[str, str]]]:
        """Version and digests of the weights of the engines that are there."""
        actors = {number: self.rollouts.engines[number] for number in self.engines()}
        return {number: ray.get(actor.__ray_call__.remote(weights_of)) for number, actor in actors.items()}


def weights_of(process: Any) -> tuple[int, dict[str, str]]:
    """Version and digests of the weights that an engine's process holds."""
    engine = process.engine
    return engine.weight_version, {name: digest(tensor) for name, tensor in engine._held.items()}


def of_cluster(cluster: Cluster, steps: int, least: int, most: int) -> dict[str, Any]:
    """Settings of a run there."""
    engines = {"min": least, "max": most}
    return SETTINGS | {"run.steps": steps, "rollout.engines": engines, "resources.ray_address": cluster.address}


def check_trained_once(config: Config, steps: int) -> list[dict[str, Any]]:
    """Every step trained on the sampler's next prompts, each once; returns its metrics."""
    metrics, samples = results(config)
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    assert groups(samples) == drawn(config, steps * PROMPTS)
    for sample in samples:
        assert sample["step"] - 1 - STALENESS <= sample["weight_versions"][0] <= sample["step"] - 1
    return metrics


def test_an_engine_that_comes_has_the_weights_of_the_others_and_is_given_work(
    cluster: Cluster, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(cluster)
    config = tiny_config(**of_cluster(cluster, 5, 1, 2))
    seen: list[dict[int, tuple[int, dict[str, str]]]] = []

    def come(script: Script) -> None:
        assert len(script.engines()) == 1
        add(cluster)
        script.wait_for(2)
        seen.append(script.weights())

    script = Script(monkeypatch, config, before_3=come, before_5=lambda script: seen.append(script.weights()))
    train(config)
    check_trained_once(config, 5)
    for (version, weights), (other_version, other_weights) in [tuple(engines.values()) for engines in seen]:
        assert version == other_version
        assert weights == other_weights
    assert [engines[0][0] for engines in seen] == [2, 4]
    assert seen[0][0][1] != seen[1][0][1], "they were trained"
    assert script.rollouts.scheduler.engines[1].sampled_tokens > 0
    assert "weights of version 2 from engine 0" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Generation]]:
    """What engines had of responses that were cut: the engine's number, and the response."""
    found: list[tuple[int, Generation]] = []
    count = EngineState.count_tokens

    def count_and_tell(engine: EngineState, request: EngineRequest, answers: Sequence[Sequence[SampledTurn]]) -> None:
        count(engine, request, answers)
        had = [loaded(one) for of_prompt in answers for one in of_prompt if one.finish_reason == "abort" and one.tokens]
        found.extend((engine.number, one) for one in had)

    monkeypatch.setattr(EngineState, "count_tokens", count_and_tell)
    return found


def test_what_an_engine_that_leaves_has_sampled_is_gone_on_with(
    cluster: Cluster, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, cut_off: list[tuple[int, Generation]]
) -> None:
    add(cluster)
    add(cluster)
    config = tiny_config(**of_cluster(cluster, 4, 1, 2) | {"rollout.max_new_tokens": LONG})
    left: dict[int, str] = {}

    def leave(script: Script) -> None:
        script.wait_for(2)
        state = script.rollouts.scheduler.engines[1]
        ends_at = time.monotonic() + COME_S
        while not state.requests:
            assert time.monotonic() < ends_at, "it has been given work"
            time.sleep(0.02)
        time.sleep(0.5)  # for some tokens
        node = script.engines()[1]
        assert main(["node", "leave", str(script.folder), node]) == 0
        left.update(script.engines())
        remove(cluster, node)

    script = Script(monkeypatch, config, before_3=leave)
    train(config)
    metrics = check_trained_once(config, 4)
    assert [*left] == [0]
    assert sum(row["rollout/suspended"] for row in metrics) > 0
    assert [row["rollout/aborted_tokens"] for row in metrics] == [0] * 4
    handed_over = [one for number, one in cut_off if number == 1]
    assert handed_over, "it was at work"
    _, samples = results(config)
    said = {(tuple(s["response_ids"][:n]), tuple(s["rollout_log_probs"][:n])) for s in samples for n in range(1, LONG)}
    found = [(tuple(one.response_ids), tuple(one.log_probs)) in said for one in handed_over]
    assert all(found), "each is how a response that was trained on begins"
    assert script.rollouts.scheduler.engines[1].is_absent


def test_a_run_goes_on_without_lost_engines_and_waits_where_too_few_are_left(
    cluster: Cluster, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(cluster)
    add(cluster)
    config = tiny_config(**of_cluster(cluster, 5, 1, 2))
    waits: list[bool] = []

    def lose(script: Script) -> None:
        script.wait_for(2)
        remove(cluster, script.engines()[0])

    def lose_the_last(script: Script) -> None:
        script.wait_for(1)
        remove(cluster, *script.engines().values())
        threading.Thread(target=come_back, args=(script,)).start()

    def come_back(script: Script) -> None:
        script.wait_for(0)
        time.sleep(2.0)
        waits.append(script.rollouts.scheduler.is_short)
        add(cluster)

    Script(monkeypatch, config, before_2=lose, before_4=lose_the_last)
    train(config)
    check_trained_once(config, 5)
    said = " ".join(capsys.readouterr().out.split())
    assert waits == [True]
    assert "0 engines are there, of the 1 that rollout.engines asks for: the run waits" in said
    assert "there: the run goes on" in said
    assert "engine 0 failed" in said
    assert "engine 1 failed" in said


@pytest.mark.exhaustive  # the tests above have each way once
def test_prompts_are_trained_once_each_while_an_engine_comes_and_goes_ten_times(
    cluster: Cluster, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(cluster)
    steps = 24
    config = tiny_config(**of_cluster(cluster, steps, 1, 2))
    came: list[int] = []

    def come(script: Script) -> None:
        add(cluster)
        script.wait_for(2)
        (version, weights), (other_version, other_weights) = script.weights().values()
        assert (version, weights) == (other_version, other_weights)
        came.append(version)

    def go(script: Script) -> None:
        node = script.engines()[[*script.engines()][len(came) % 2]]  # in turns the new one, and the older one
        if len(came) % 3:
            assert main(["node", "leave", str(script.folder), node]) == 0
        remove(cluster, node)
        script.wait_for(1)

    acts = {f"before_{number}": come if number % 2 == 0 else go for number in range(2, 22)}
    Script(monkeypatch, config, **acts)
    train(config)
    assert len(came) == 10
    check_trained_once(config, steps)
