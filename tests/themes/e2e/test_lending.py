"""Runs that lend the trainer's devices to engines: the same prompts, every token under the weights that it says, also after a
resume, and engines that are killed awake and asleep."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from megarl.config import Config
from megarl.options.lending.turns import LendingRule, LentEngines
from megarl.rollout.engines.protocol import EngineRequest, Generation
from megarl.rollout.engines.stored_turns import SampledTurn, loaded
from megarl.rollout.scheduling.engine_state import EngineState
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.runs.training_side import POLICY
from megarl.workers.rollouts import Rollouts
from tests.rollout.tiny import reference_log_probs
from tests.themes.e2e import slow_lent_engine
from tests.themes.e2e.test_async import drawn, groups, run, under_way

pytestmark = pytest.mark.usefixtures("local_ray")
STEPS, PROMPTS, TOKENS, STALENESS = 4, 4, 10, 1
LENT = 1
"""The number of the lent engine."""
SETTINGS: dict[str, Any] = {
    "data.eval": None,
    "run.log_samples": 1000,
    "run.resume": "auto",
    "resources.placement": "separate",
    "rollout.engine": f"{slow_lent_engine.__file__}:SlowEngine",
    "rollout.max_new_tokens": TOKENS,
    "rollout.ignore_eos": True,
    "rollout.threads": 1,
    "rollout.schedule": {"mode": "async", "max_staleness": STALENESS, "lent_engines": 1},
    "algorithm.rollout_correction": {"mode": "tis_token"},
    "algorithm.kl": {"coef": 0.0},
}


@pytest.fixture
def always_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether lending pays is not asked of a machine that other tests share."""
    monkeypatch.setattr(LendingRule, "pays", lambda rule: True)


@pytest.fixture
def answers_of_lent(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """What lent engines answered."""
    found: list[Generation] = []
    count = EngineState.count_tokens

    def count_and_tell(engine: EngineState, request: EngineRequest, answers: Sequence[Sequence[SampledTurn]]) -> None:
        count(engine, request, answers)
        if engine.is_dispensable:
            found.extend(loaded(one) for group in answers for one in group)

    monkeypatch.setattr(EngineState, "count_tokens", count_and_tell)
    return found


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({}, id="embedded"),
        pytest.param(
            {"rollout.engine": "sglang", "rollout.max_new_tokens": 40},
            id="sglang",
            marks=[pytest.mark.exhaustive, pytest.mark.slow],
        ),
    ],
)
@pytest.mark.usefixtures("always_lent")
def test_lent_engines_sample_what_is_trained_on_under_the_weights_that_they_say(
    engine: dict[str, Any],
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers_of_lent: list[Generation],
) -> None:
    update = Rollouts.update_weights

    def update_and_export(rollouts: Rollouts) -> None:
        assert not [n for n in rollouts.lent if rollouts.scheduler.engines[n].version is not None], "they sleep"
        update(rollouts)
        assert rollouts.updates is not None
        rollouts.updates.roles.export(POLICY, str(tmp_path / f"version-{rollouts.version}"))

    monkeypatch.setattr(Rollouts, "update_weights", update_and_export)
    run(tiny_config(**SETTINGS | engine | {"run.steps": 2}))
    config = tiny_config(**SETTINGS | engine | {"run.steps": STEPS})
    metrics, samples = run(config)

    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    trained = groups(samples)
    assert trained == drawn(config, len(trained)), "as without lending"
    assert sorted(trained + (left := under_way(config))) == sorted(drawn(config, len(trained + left)))
    for row in metrics:
        assert row["rollout/dropped_stale"] == row["rollout/aborted_tokens"] == 0
        assert 0 <= row["rollout/lent_share"] <= 1
        assert (row["rollout/lent_s"] > 0) is (row["rollout/lending_s"] > 0) is (row["rollout/lent_share"] > 0)
        assert row["staleness/max"] <= STALENESS
    for name in ("rollout/lent_share", "rollout/lent_tokens", "rollout/suspended"):  # of suspended: what they had begun
        assert sum(row[name] for row in metrics) > 0, name

    in_samples = {value for sample in samples for value in sample["rollout_log_probs"]}
    assert {one.log_probs[-1] for one in answers_of_lent if one.log_probs} & in_samples, "their tokens are trained on"
    models = [AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)]
    models += [AutoModelForCausalLM.from_pretrained(tmp_path / f"version-{v}", dtype=torch.float32) for v in range(1, STEPS)]
    for sample in samples:
        prompt, ids, versions = sample["prompt_ids"], sample["response_ids"], sample["weight_versions"]
        now = sample["step"] - 1
        assert len(ids) == config.rollout.max_new_tokens
        assert versions == sorted(versions)
        assert now - STALENESS <= versions[0] <= versions[-1] <= now
        by_version = {v: reference_log_probs(models[v], prompt, ids, 1.0) for v in {*versions, now}}
        expected = torch.stack([by_version[version][place] for place, version in enumerate(versions)])
        assert (torch.tensor(sample["rollout_log_probs"]) - expected).abs().max() < 1e-4
        assert (torch.tensor(sample["training"]["log_probs"]) - by_version[now]).abs().max() < 1e-4


class Killer:
    """Kills the lent engine as it begins to work, and once more, when it has come back, as soon as it sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[str] = []
        self.back_after: list[int] = []
        self.started_after: list[int] = []
        self.engines: list[Any] = []
        resume, rest, next_batch = Scheduler.resume, LentEngines.rest, Rollouts.next_batch
        come_back = EngineState.come_back

        async def come_back_and_note(engine: EngineState, *arguments: Any) -> None:
            await come_back(engine, *arguments)
            self.started_after.append(len(self.killed))

        def next_batch_and_look(rollouts: Rollouts, *arguments: Any) -> Any:
            self.engines = rollouts.engines
            return next_batch(rollouts, *arguments)

        def resume_and_kill(scheduler: Scheduler, engines: Sequence[int], version: int) -> None:
            resume(scheduler, engines, version)
            if [*engines] == [LENT]:
                self.back_after.append(len(self.killed))
                if version == 1 and not self.killed:
                    self.kill("at work")

        def rest_and_kill(lent: LentEngines) -> None:
            rest(lent)
            if self.back_after[-1:] == [1] and len(self.killed) == 1:
                self.kill("asleep")

        monkeypatch.setattr(EngineState, "come_back", come_back_and_note)
        monkeypatch.setattr(Scheduler, "resume", resume_and_kill)
        monkeypatch.setattr(LentEngines, "rest", rest_and_kill)
        monkeypatch.setattr(Rollouts, "next_batch", next_batch_and_look)

    def kill(self, when: str) -> None:
        os.kill(ray.get(self.engines[LENT].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        self.killed.append(when)


@pytest.mark.exhaustive  # tests/rollout/test_lent_engines.py stands for it
@pytest.mark.usefixtures("always_lent")
def test_a_lent_engine_that_is_killed_while_it_works_and_while_it_sleeps_loses_nothing(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killer, steps = Killer(monkeypatch), 10
    metrics, samples = run(config := tiny_config(**SETTINGS, **{"run.steps": steps}))
    assert killer.killed == ["at work", "asleep"]
    assert killer.started_after[-1] == 2, "it came back both times"
    assert groups(samples) == drawn(config, steps * PROMPTS)
    assert [row["rollout/aborted_tokens"] for row in metrics] == [0] * steps
    assert capfd.readouterr().out.count("engine 1 failed") >= 2
    for sample in samples:
        assert sample["step"] - 1 - STALENESS <= sample["weight_versions"][0] <= sample["step"] - 1
