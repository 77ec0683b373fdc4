"""A run that continues from a checkpoint is the run that was never interrupted: bit for bit, and to 1e-6 in another layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Config
from megarl.runs.manifest import check, made_by
from megarl.trainers.rl.train import train
from tests.themes.e2e.records import BY_ENGINES, curve, tensors

pytestmark = pytest.mark.usefixtures("local_ray")
STEPS, HALF = 4, 2
SETTINGS: dict[str, Any] = {  # everything that remembers something from step to step
    "algorithm": {
        "name": "ppo",
        "mini_batches": 2,
        "kl": {"apply_to": "reward", "coef": 0.05, "target": 0.01, "horizon": 100},
        "shaping": {"normalise": True},
        "policy_loss": "clip_cov",  # whose pick is random
        "policy_loss_args": {"share": 0.1, "low": 0.001},
        "entropy": {"coef": 0.01, "target": 10.0, "top_share": 0.5},
        "positive_nll": {"coef": 0.1, "threshold": 0.2},
        "gae_lambda": 1.0,
        "advantage_args": {"critic_lambda": 0.9, "length_alpha": 0.5},
    },
    "policy.layout": {"dp": 2},
    "policy.optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
    "reference.reset_every": 1,
    "reference.reset_share": 0.3,
    "run.steps": STEPS,
    "run.save_every": HALF,
    "run.keep_checkpoints": 0,
    "run.resume": "auto",
    "run.eval_every": HALF,
    "data.train.limit": 10,  # fewer prompts than the steps need: the order of a second epoch is part of it
    "data.curriculum": {"min_pass_rate": 0.1},  # which rows the second epoch has, too
    "data.source_key": "data_source",
}


def state(checkpoint: Path) -> dict[str, Any]:
    """The driver's, without what evaluations took."""
    content = json.loads((checkpoint / "state.json").read_text())
    for figures in content["evaluations"].values():
        if figures is not None:
            figures.pop("seconds")
    return content


def interrupted(whole: Path, name: str) -> Path:
    """A copy of the run as it was when it had just begun to write its first checkpoint's successor."""
    folder = whole.parent / name
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:06d}")
    (folder / "summary.json").unlink()
    (folder / "checkpoints" / f".writing_step_{HALF + 1:06d}" / "policy").mkdir(parents=True)
    return folder


def test_a_resumed_run_is_the_uninterrupted_one(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config(**SETTINGS, **{"run.name": "whole"})
    summary, whole = train(config), Path(config.run_folder)
    expected, last = curve(whole), whole / "checkpoints" / f"step_{STEPS:06d}"
    assert [row["step"] for row in expected] == list(range(STEPS + 1))
    assert all("source/chain_sum/tokens_mean" in row for row in expected[1:])
    assert expected[HALF + 1]["curriculum/left_out"] > 0
    half = last.with_name(f"step_{HALF:06d}")
    assert state(half)["sampler"]["pass_rates"]["left_out_through"]
    assert (made_by(half)["step"], made_by(half)["weight_version"]) == (HALF, state(half)["weight_version"])
    assert made_by(half)["evaluation"]["accuracy"] == state(half)["evaluations"][f"step {HALF}"]["accuracy"]

    resumed = interrupted(whole, "resumed")
    assert train(tiny_config(**SETTINGS, **{"run.name": "resumed"}))["gates"] == summary["gates"]
    assert curve(resumed) == expected
    assert [row["policy/entropy_coef"] for row in expected[1:]] == pytest.approx([0.01, 0.015, 0.02, 0.025])
    assert all(row["policy/chosen"] > 0.05 and row["policy/nll"] > 0 for row in expected[1:])
    assert {path.name for path in (resumed / "checkpoints").iterdir()} == {half.name, last.name}
    again = resumed / "checkpoints" / last.name
    check(again)
    assert state(again) == state(last)
    for role in ("policy", "critic", "reference"):
        found, wanted = tensors(again / role), tensors(last / role)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), f"{role}: {key}"

    moved, samples = interrupted(whole, "elsewhere"), str(whole / "samples.jsonl")
    recorded = {"rollout.engine": "replay", "rollout.replay_from": samples, "data.eval": None, "run.eval_every": 0}
    elsewhere = {"policy.layout": {"tp": 2, "sequence_parallel": True}, "run.name": "elsewhere"}
    train(tiny_config(**{**SETTINGS, **recorded, **elsewhere}))
    for row, reference in zip(curve(moved)[HALF + 1 :], expected[HALF + 1 :], strict=True):
        for name, value in reference.items():
            if not name.startswith(("eval/", *BY_ENGINES)):
                assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
