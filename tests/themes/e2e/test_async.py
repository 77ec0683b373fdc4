"""Runs in every schedule: the prompts in the sampler's order, no sample older than it may be, and engines that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from megarl.config import Config
from megarl.errors import WorkerError
from megarl.observe import read_metrics
from megarl.trainers.rl.train import open_run, train
from megarl.workers.roles import Roles
from megarl.workers.rollouts import Rollouts

pytestmark = pytest.mark.usefixtures("local_ray")
STEPS, PROMPTS, SAMPLES = 5, 4, 4
SCHEDULES: dict[str, dict[str, Any]] = {
    "one_step": {"mode": "one_step_off_policy"},
    "async": {"mode": "async", "max_staleness": 2},
    "sync, over-sampled": {"mode": "sync", "over_sample": 2},
}
STALENESS = {"one_step": 1, "async": 2, "sync, over-sampled": 1}  # what was passed over goes on under the next version


@pytest.fixture
def settings() -> dict[str, Any]:
    """A run without evaluation whose responses all have 12 tokens."""
    return {
        "data.eval": None,
        "run.steps": STEPS,
        "run.log_samples": 1000,
        "rollout.max_new_tokens": 12,
        "rollout.ignore_eos": True,
        "algorithm.kl": {"coef": 0.0},
    }


def run(config: Config) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics of the steps, and all samples."""
    train(config)
    return results(config)


def results(config: Config) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    folder = Path(config.run_folder)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]], samples


def groups(samples: list[dict[str, Any]]) -> list[str]:
    """The groups in the order in which they were trained on; each must be whole, and of one step."""
    sizes = Counter((sample["step"], sample["group_id"]) for sample in samples)
    assert set(sizes.values()) == {SAMPLES}
    assert len({group for _, group in sizes}) == len(sizes), "no group is trained on twice"
    return [group for _, group in sizes]


def under_way(config: Config) -> list[str]:
    """The groups that the last checkpoint says were drawn and have not been trained on."""
    last = sorted((Path(config.run_folder) / "checkpoints").iterdir())[-1]
    return [prompt["group_id"] for prompt in json.loads((last / "state.json").read_text())["groups"]["prompts"]]


def drawn(config: Config, count: int) -> list[str]:
    """The first groups in the sampler's order."""
    return [prompt.group_id for prompt in open_run(config).sampler.next(count)]


@pytest.mark.parametrize(
    "name",
    # what is one step late is a case of what may be two steps late
    [pytest.param("one_step", marks=pytest.mark.exhaustive), "async", "sync, over-sampled"],
)
def test_every_schedule_trains_on_the_sampler_s_prompts_within_its_staleness(
    name: str, tiny_config: Callable[..., Config], settings: dict[str, Any]
) -> None:
    settings = {**settings, "rollout.schedule": SCHEDULES[name], "run.resume": "auto"}
    if name == "async":  # stopped and resumed: nothing is repeated or dropped
        first = tiny_config(**{**settings, "run.steps": 2})
        train(first)
        assert len(under_way(first)) >= PROMPTS
    config = tiny_config(**settings)
    metrics, samples = run(config)
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    for row in metrics:
        version = row["step"] - 1
        of_step = [sample for sample in samples if sample["step"] == row["step"]]
        assert len(of_step) == PROMPTS * SAMPLES
        assert row["staleness/mean"] <= row["staleness/max"] <= STALENESS[name]
        for sample in of_step:
            versions = sample["weight_versions"]
            assert versions == sorted(versions)
            assert version - STALENESS[name] <= versions[0] <= versions[-1] <= version
            if name == "one_step":
                assert set(versions) == {max(0, version - STALENESS[name])}
    trained, left = groups(samples), under_way(config)
    assert sorted(trained + left) == sorted(drawn(config, len(trained + left)))
    assert not any(row["rollout/dropped_stale"] or row["rollout/aborted_tokens"] for row in metrics)
    assert sum(row["staleness/mean"] for row in metrics) > 0
    if "over_sample" not in SCHEDULES[name]:
        assert trained == drawn(config, len(trained))


@pytest.mark.exhaustive  # test_rl_options.py replaces them in the other schedule, and the test above keeps to its staleness
def test_uniform_groups_are_replaced_while_generation_goes_on(
    tiny_config: Callable[..., Config], settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "same.py").write_text("def reward(samples):\n    return [1.0] * len(samples)\n")
    more = {"rewards": [{"name": f"{tmp_path / 'same.py'}:reward"}], "rollout.dynamic_sampling_rounds": 2, "run.steps": 3}
    metrics, samples = run(tiny_config(**{**settings, **more, "rollout.schedule": SCHEDULES["async"]}))
    assert [row["rollout/discarded_groups"] for row in metrics] == [8, 8, 8]
    assert all(row["staleness/max"] <= 2 and not row["rollout/dropped_stale"] for row in metrics)
    assert len(groups(samples)) == 3 * PROMPTS


class Killer:
    """Kills engine 0 while it generates for a step, and engine 1 in the middle of a weight update.

    `process_of` gives the process to kill; it is asked before there is work, for a short response may end meanwhile.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process_of: Callable[[Any], int], *, at_step: int) -> None:
        self.killed: list[str] = []
        self.rollouts: Rollouts | None = None
        self.at_step, self.steps = at_step, 0
        next_batch, push = Rollouts.next_batch, Roles.push

        def next_batch_and_kill(rollouts: Rollouts, *arguments: Any) -> Any:
            self.rollouts, self.steps = rollouts, self.steps + 1
            if self.steps == self.at_step:
                pid = process_of(rollouts.engines[0])
                threading.Thread(target=self.while_it_works, args=(0, pid)).start()
            return next_batch(rollouts, *arguments)

        def push_and_kill(roles: Roles, *arguments: Any, **named: Any) -> Any:
            if self.steps == self.at_step + 1 and "in update" not in self.killed:
                assert self.rollouts is not None
                self.killed.append("in update")
                os.kill(process_of(self.rollouts.engines[1]), signal.SIGKILL)
            return push(roles, *arguments, **named)

        monkeypatch.setattr(Rollouts, "next_batch", next_batch_and_kill)
        monkeypatch.setattr(Roles, "push", push_and_kill)

    def while_it_works(self, engine: int, pid: int) -> None:
        assert self.rollouts is not None
        state, ends_at = self.rollouts.scheduler.engines[engine], time.monotonic() + 20
        while not state.load and time.monotonic() < ends_at:
            time.sleep(0.001)
        self.killed.append("in generation" if state.load else "idle")
        os.kill(pid, signal.SIGKILL)


def check_everything_is_accounted_for(config: Config, killer: Killer, *, staleness: int) -> None:
    metrics, samples = results(config)
    assert sorted(killer.killed) == ["in generation", "in update"]
    assert sum(row["rollout/requeued"] for row in metrics) >= 1
    for sample in samples:
        assert sample["step"] - 1 - staleness <= sample["weight_versions"][0] <= sample["step"] - 1
    everything = groups(samples) + under_way(config)
    assert sorted(everything) == sorted(drawn(config, len(everything)))
    assert len(groups(samples)) == STEPS * PROMPTS


def test_engines_killed_while_they_generate_and_in_an_update_lose_nothing(
    tiny_config: Callable[..., Config], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def actor_of(engine: Any) -> int:
        return int(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())))

    killer = Killer(monkeypatch, actor_of, at_step=2)
    config = tiny_config(**{**settings, "rollout.engines": 2, "rollout.max_new_tokens": 120})
    train(config)
    check_everything_is_accounted_for(config, killer, staleness=0)


@pytest.mark.exhaustive  # the test above and tests/rollout/test_sglang_killed.py stand for it
@pytest.mark.slow
def test_sglang_servers_killed_while_they_generate_and_in_an_update_lose_nothing(
    tiny_config: Callable[..., Config], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def server_of(engine: Any) -> int:
        port = ray.get(engine.endpoint.remote()).url.rpartition(":")[2]
        for process in psutil.Process(os.getpid()).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # other children come and go
                if "megarl.rollout.engines.sglang.launch" in (line := process.cmdline()) and port in line:
                    return process.pid
        raise AssertionError("no server listens there")

    killer = Killer(monkeypatch, server_of, at_step=2)
    more = {"rollout.engine": "sglang", "rollout.engines": 2, "rollout.max_new_tokens": 40, "rollout.threads": 1}
    # by process group, which must be made anew for an engine that comes back
    more |= {"rollout.weight_transport": "process_group", "resources.placement": "separate"}
    config = tiny_config(**{**settings, **more, "rollout.schedule": SCHEDULES["async"]})
    train(config)
    check_everything_is_accounted_for(config, killer, staleness=2)


def lose_while_starting(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Engine 0's process ends in place of its first `times` starts."""
    start = Rollouts._start
    lost: list[int] = []

    def start_or_end(rollouts: Rollouts, number: int) -> Any:
        if number or len(lost) == times:
            return start(rollouts, number)
        lost.append(number)
        return rollouts.engines[0].__ray_call__.remote(lambda _: os._exit(1))

    monkeypatch.setattr(Rollouts, "_start", start_or_end)


def test_an_engine_lost_while_it_starts_is_started_once_more(
    tiny_config: Callable[..., Config],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    more = {"rollout.engines": 2, "run.steps": 1}
    lose_while_starting(monkeypatch, 1)
    metrics, _ = run(tiny_config(**{**settings, **more}))
    assert [row["step"] for row in metrics] == [1]
    assert capfd.readouterr().out.count("engine 0's process was lost while it started; it is started again") == 1
    lose_while_starting(monkeypatch, 2)
    with pytest.raises(WorkerError, match="engine 0 failed in phase 'engine start'"):
        train(tiny_config(**{**settings, **more, "run.name": "lost-twice", "run.max_restarts": 0}))
