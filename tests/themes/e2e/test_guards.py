"""A run whose reward is poisoned twice: what cannot be applied is skipped, what leads away is taken back, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")

REWARD = """
calls = 0

def poisoned(samples):
    global calls
    calls += len(samples) > 2  # those before the run are of two made-up responses
    scale = {3: -1e30, 5: 1e3}.get(calls, 1.0)
    return [scale * (1 + sum(c.isdigit() for c in s.response_text)) for s in samples]
"""


def policy(checkpoint: Path) -> dict[str, Tensor]:
    """Weights and Adam's moments of the policy, as the checkpoint has them."""
    reader = FileSystemReader(str(checkpoint / "policy"))
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def test_a_poisoned_reward_is_skipped_and_a_run_that_left_its_bounds_goes_back(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = tiny_config(
        **{
            "run.steps": 6, "run.save_every": 1, "run.keep_checkpoints": 0, "data.eval": None,
            "run.guards": [{"metric": "reward/mean", "above": 100, "action": "rollback"}],
            "rewards": [{"name": f"{tmp_path / 'reward.py'}:poisoned"}],
            "algorithm": {"name": "grpo", "advantage": "dr_grpo", "kl": {"coef": 0.0}},
        }
    )  # fmt: skip
    summary = train(config)
    folder = Path(config.run_folder)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert [row["policy/skipped"] for row in rows] == [0, 0, 1, 0, 0, 0]
    assert [row["policy/non_finite"] for row in rows] == [0, 0, 1, 0, 0, 0]
    assert [row["guards/skipped"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert [row["guards/rollbacks"] for row in rows] == [0, 0, 0, 0, 0, 1]
    assert summary["guards"] == {"skipped": 1, "rollbacks": 1}
    at = {step: policy(folder / "checkpoints" / f"step_{step:06d}") for step in range(1, 7)}
    names = [name for name in at[1] if "rng" not in name]
    assert any(name.startswith("optimizer.exp_avg") for name in names)

    def same(one: int, other: int) -> bool:
        return all(torch.equal(at[one][name], at[other][name]) for name in names)

    assert [same(step, step + 1) for step in range(1, 6)] == [False, True, False, True, False]
    prompts = [json.loads(line)["group_id"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(set(prompts)) == 6 * 4  # none came twice
