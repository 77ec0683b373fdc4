"""Runs that go on with other settings or rows: the rates that move their weights, and the rows that they see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Config, SupervisedConfig, parse_supervised_config
from megarl.errors import CheckpointError
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train as train_rl
from megarl.trainers.supervised.train import train
from tests.themes.e2e.records import tensors

pytestmark = pytest.mark.usefixtures("local_ray")
LR = 1e-2


def rates(config: Config | SupervisedConfig, name: str) -> list[float]:
    return [row[name] for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if name in row]


def movement(config: Config | SupervisedConfig, *steps: int) -> float:
    """The largest difference of a weight between the checkpoints of two steps."""
    one, other = (tensors(Path(config.run_folder) / "checkpoints" / f"step_{step:06d}" / "policy") for step in steps)
    names = [name for name in one if not name.startswith("optimizer.") and torch.is_tensor(one[name])]
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in names)


def test_a_longer_decay_and_added_rows_go_on(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def config(**more: Any) -> SupervisedConfig:
        optimizer = {"lr": LR, "eps": 1e-8, "schedule": "linear"}
        data = {"train": {"source": "jsonl", "path": str(file)}, "rows_per_step": 2, "max_tokens": 32, "chat_template": "never"}
        run = {"folder": str(tmp_path / "runs"), "steps": more.pop("steps"), "keep_checkpoints": 0}
        return parse_supervised_config({
            "run": run | ({"resume": "auto"} if more.pop("resume", True) else {}),
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "policy": {"max_tokens_per_micro_batch": 128, "threads_per_rank": 1, "optimizer": optimizer},
            "objective": {"name": "sft"},
            "data": data | more,
        })  # fmt: skip

    def write(count: int, first: int = 0) -> None:
        file.write_text("".join(f'{{"prompt": "{n}+1=", "response": "{n + 1}"}}\n' for n in range(first, first + count)))

    write(4)
    short = config(steps=1, resume=False)
    train(short)
    assert rates(short, "train/lr") == [LR], "the only step of a decay has a rate"

    write(4, first=2)
    checkpoint = Path(short.run_folder) / "checkpoints" / "step_000001"
    metrics = (Path(short.run_folder) / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="has 4 rows, and 4 in the checkpoint with other contents"):
        train(config(steps=4))
    write(6)
    with pytest.raises(CheckpointError, match="'append'"):
        train(config(steps=4))
    assert (Path(short.run_folder) / "metrics.jsonl").read_bytes() == metrics, "refused before anything was written"

    longer = config(steps=4, on_change="append")
    train(longer)
    assert rates(longer, "train/lr") == pytest.approx([LR, 0.75 * LR, 0.5 * LR, 0.25 * LR])
    assert 0.1 * LR < movement(longer, 1, 4) < 3 * LR
    before, after = (json.loads((folder / "state.json").read_text())["sampler"] for folder in (
        checkpoint, checkpoint.with_name("step_000004"),
    ))  # fmt: skip
    assert (before["rows"], after["rows"], after["position"], after["epochs_before"]) == (4, 6, 8, 0)


def test_a_changed_rate_moves_the_weights_and_is_the_one_that_is_told(tiny_config: Callable[..., Config]) -> None:
    run = {"run.keep_checkpoints": 0, "data.eval": None, "policy.optimizer": {"lr": LR, "schedule": "cosine", "eps": 1e-8}}
    first = tiny_config(**run, **{"run.steps": 1, "run.save_every": 1})
    train_rl(first)
    smaller = {"lr": LR / 100, "schedule": "constant", "eps": 1e-8}
    config = tiny_config(**{**run, "run.steps": 2, "run.resume": "auto", "policy.optimizer": smaller})
    train_rl(config)
    assert rates(config, "policy/lr") == pytest.approx([LR, LR / 100])
    assert 0 < movement(config, 1, 2) < LR / 20
