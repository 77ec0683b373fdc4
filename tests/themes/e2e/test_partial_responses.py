"""A run in sync mode whose slow groups are cut and go on: every token under the weights that it says, also after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config import Config
from megarl.runs.training_side import POLICY
from megarl.workers.rollouts import Rollouts
from tests.rollout.tiny import reference_log_probs
from tests.themes.e2e import slow_engine
from tests.themes.e2e.test_async import drawn, groups, run, under_way

pytestmark = pytest.mark.usefixtures("local_ray")
STEPS, PROMPTS, TOKENS = 4, 4, 12
SETTINGS: dict[str, Any] = {
    "data.eval": None,
    "run.log_samples": 1000,
    "run.resume": "auto",
    "rollout.engine": f"{slow_engine.__file__}:SlowEngine",
    "rollout.max_new_tokens": TOKENS,
    "rollout.ignore_eos": True,
    "rollout.schedule": {"mode": "sync", "over_sample": 3},
    "algorithm.rollout_correction": {"mode": "tis_token"},
    "algorithm.kl": {"coef": 0.0},
}


def test_every_token_of_a_run_that_continues_has_the_log_prob_of_its_version(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Rollouts.update_weights

    def update_and_export(rollouts: Rollouts) -> None:
        update(rollouts)
        assert rollouts.updates is not None
        rollouts.updates.roles.export(POLICY, str(tmp_path / f"version-{rollouts.version}"))

    monkeypatch.setattr(Rollouts, "update_weights", update_and_export)
    first = tiny_config(**SETTINGS, **{"run.steps": 2})
    run(first)
    last = sorted((Path(first.run_folder) / "checkpoints").iterdir())[-1]
    partial = json.loads((last / "state.json").read_text())["groups"]["partial"]
    assert partial, "responses that go on are in the checkpoint"
    kept = {token for group in partial.values() for turn in group.values() for token in turn["log_probs"]}
    config = tiny_config(**SETTINGS, **{"run.steps": STEPS})
    metrics, samples = run(config)

    assert sum(row["rollout/suspended"] for row in metrics) > 0
    assert [row["rollout/dropped_stale"] for row in metrics] == [0] * STEPS
    assert [row["rollout/aborted_tokens"] for row in metrics] == [0] * STEPS
    trained = groups(samples)
    assert sorted(trained + (left := under_way(config))) == sorted(drawn(config, len(trained + left)))
    assert kept <= {value for sample in samples for value in sample["rollout_log_probs"]}, "nothing of it was thrown away"

    models = [AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)]
    models += [AutoModelForCausalLM.from_pretrained(tmp_path / f"version-{v}", dtype=torch.float32) for v in range(1, STEPS)]
    spanning = 0
    for row in metrics:
        now, of_step = row["step"] - 1, [sample for sample in samples if sample["step"] == row["step"]]
        older = 0
        for sample in of_step:
            prompt, ids, versions = sample["prompt_ids"], sample["response_ids"], sample["weight_versions"]
            assert len(ids) == TOKENS
            assert versions == sorted(versions)
            assert now - 1 <= versions[0] <= versions[-1] <= now
            spanning += len(set(versions)) > 1
            older += sum(version < now for version in versions)
            by_version = {v: reference_log_probs(models[v], prompt, ids, 1.0) for v in {*versions, now}}
            expected = torch.stack([by_version[version][place] for place, version in enumerate(versions)])
            assert (torch.tensor(sample["rollout_log_probs"]) - expected).abs().max() < 1e-5
            trainers = torch.tensor(sample["training"]["log_probs"])
            assert (trainers - by_version[now]).abs().max() < 1e-5, "corrections compare with the policy of the step"
        assert row["rollout/older_tokens"] == older
        assert row["staleness/max"] == (1 if older else 0)
    assert spanning > 0
    assert (
        max(
            (one.weight - two.weight).abs().max()
            for one, two in zip(*(m.modules() for m in models[:2]), strict=True)
            if isinstance(one, torch.nn.Linear)
        )
        > 1e-4
    ), "the versions must differ for this to say anything"
