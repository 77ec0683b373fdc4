"""Whole runs whose engine drafts with the model's layer for multi-token prediction, and by a lookup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train
from tests.families import build_folder
from tests.predicting import DRAFTED, build_predicting

NEW_LAYER = pytest.importorskip("megarl.options.prediction.new_layer")
pytestmark = pytest.mark.usefixtures("local_ray")
LENGTH = "rollout/acceptance_length"


@pytest.fixture
def run(tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`run(family, **overrides)`: the metrics of each step; engine and trainer must have the same log-probs after each sync."""

    def go(family: str, **overrides: Any) -> list[dict[str, Any]]:
        folder = tmp_path / family
        if not folder.exists():
            if family in DRAFTED:
                build_folder(family, tmp_path / "plain")
                NEW_LAYER.add_layer(tmp_path / "plain", folder)
            else:
                build_predicting(family, folder)
            transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        sizes = {"rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 8, "rollout.max_new_tokens": 12}
        more = {"model.path": str(folder), "data.eval": None, "policy.share_prefix": True, "policy.optimizer.lr": 1e-2} | sizes
        config = tiny_config(**more | overrides)
        gates = train(config)["gates"]
        assert gates["log_prob_max_difference_as_loaded"] < 1e-4
        if config.rollout.schedule.mode == "sync":  # elsewhere samples may be old
            assert gates["log_prob_max_difference_after_sync"] < 1e-4
        return [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if row["step"]]

    return go


@pytest.mark.exhaustive  # 28 steps; the last test has a run, tests/themes/parallel/test_prediction.py the gradients
@pytest.mark.slow
def test_drafts_are_accepted_more_often_while_their_layer_is_trained(run: Callable[..., list[dict[str, Any]]]) -> None:
    """Of three tokens a pass at best; the same run with a layer that stays as it was is no better at its end."""
    drafts = {"algorithm": "mtp", "num_steps": 2}
    trained, kept = (
        run("glm4_moe", **{"run.steps": 14, "rollout.speculative": drafts, "policy.mtp": {"train": train}, "run.name": name})
        for name, train in (("trained", True), ("kept", False))
    )
    lengths = [[row[LENGTH] for row in rows] for rows in (trained, kept)]
    first, last = ([sum(part) / 3 for part in parts] for parts in zip(*((one[:3], one[-3:]) for one in lengths), strict=True))
    assert last[0] > first[0] + 0.3
    assert last[0] > last[1] + 0.3
    for row in (*trained, *kept):
        assert row["rollout/acceptance_rate"] == row["rollout/accepted_tokens"] / row["rollout/drafted_tokens"]
    assert trained[-1]["policy/mtp_loss"] < trained[0]["policy/mtp_loss"]


@pytest.mark.slow
@pytest.mark.exhaustive  # the test above, tests/convert/test_new_layer.py, and gradients in tests/themes/parallel
def test_a_model_without_such_a_layer_is_given_one_that_learns_to_draft(run: Callable[..., list[dict[str, Any]]]) -> None:
    drafts = {"algorithm": "mtp", "num_steps": 2}
    more = {"rollout.ignore_eos": True}  # a response of one token has no draft
    rows = run("llama", **more, **{"run.steps": 14, "rollout.speculative": drafts, "policy.mtp": {"train": True}})
    lengths = [row[LENGTH] for row in rows]
    assert sum(lengths[-3:]) / 3 > sum(lengths[:3]) / 3 + 0.2


@pytest.mark.slow
def test_weights_that_change_in_mid_response_change_its_drafts(run: Callable[..., list[dict[str, Any]]]) -> None:
    """DeepSeek-V3 in mode async, with routing replay: choices of experts are those of the passes that verified tokens."""
    steps = run(
        "deepseek_v3",
        **{
            "run.steps": 3,
            "rollout.speculative": {"algorithm": "mtp", "num_steps": 3},
            "rollout.schedule": {"mode": "async"},
            "algorithm.rollout_correction": {"mode": "tis_token"},
            "policy.mtp": {"train": True},
            "policy.routing": {"replay": "engine"},
        },
    )
    for row in steps:
        assert 1 <= row[LENGTH] <= 4
        assert row["routing/missing"] < 0.5
