"""Whole runs whose engines are sent adapters alone: bytes, agreement after each update, and engines that withhold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config
from megarl.errors import GuardError
from megarl.models.registry import load_hf_config
from megarl.observe import read_metrics
from megarl.options.lora.weight_map import Lora
from megarl.trainers.rl.train import train
from megarl.weights.model_compatibility import ServedModel

pytestmark = pytest.mark.usefixtures("local_ray")

ENGINES = Path(__file__).parent / "withholding_engine.py"
TRAINED: dict[str, Any] = {
    "data.eval": None,
    "run.steps": 3,
    "policy.lora": {"rank": 4, "alpha": 16.0},
    "policy.optimizer": {"lr": 2e-2},
    "run.guards": [{"metric": "mismatch/log_prob_max", "above": 1e-4, "action": "stop"}],
}


def bytes_of(folder: Path, lora: Lora) -> int:
    """Of all adapters of a model in float32."""
    shapes = ServedModel(load_hf_config(folder), "float32", lora=lora).adapter_map.hf_shapes()
    return 4 * sum(rows * cols for rows, cols in shapes.values())


@pytest.mark.slow
def test_engines_agree_with_the_trainer_after_every_update_of_adapters_alone(
    tiny_config: Callable[..., Config], tiny_model: Path
) -> None:
    config = tiny_config(**TRAINED | {"run.name": "sent", "policy.layout": {"pp": 2}, "rollout.engines": 2})
    train(config)
    steps = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if "speed/sync_bytes" in row]
    of_all = bytes_of(tiny_model, Lora(4, 16.0))
    assert [row["speed/sync_bytes"] for row in steps] == [0, 2 * of_all, 2 * of_all]
    assert [row["mismatch/log_prob_max"] < 1e-4 for row in steps] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["WithoutAdapters", "LastAdapters"])
def test_a_run_whose_engines_compute_with_other_adapters_is_stopped(engine: str, tiny_config: Callable[..., Config]) -> None:
    config = tiny_config(**TRAINED | {"run.name": engine, "rollout.engine": f"{ENGINES}:{engine}"})
    with pytest.raises(GuardError, match="mismatch/log_prob_max"):
        train(config)
    steps = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if "mismatch/log_prob_max" in row]
    assert len(steps) == 2, "the first step's adapters add nothing yet"
