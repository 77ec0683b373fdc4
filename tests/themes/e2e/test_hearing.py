"""Runs of a model that hears, from rows with sounds to exported weights, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.cli import main
from megarl.config import parse_config
from megarl.errors import EngineError
from megarl.observe import read_metrics
from megarl.rollout.engines.registry import check_engine
from megarl.trainers.rl.train import train
from tests import hearing

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of tests/hearing.py with a tokenizer, and sounds in its folder `media`."""
    folder = tmp_path_factory.mktemp("models") / "hearing"
    hearing.build_hearing_folder(folder)
    hearing.sounds(folder / "media")
    hearing.save_tokenizer(folder)
    return folder


def config_of(model: Path, folder: Path, **sections: Any) -> Any:
    rows, reward = folder / "rows.jsonl", folder / "reward.py"
    files = [str(model / "media" / f"{name}.wav") for name in hearing.SECONDS]
    lines: list[dict[str, Any]] = [{"problem": f"w{n} <audio> w5", "audios": [files[n % 3]]} for n in range(12)]
    lines += [{"problem": f"w{n}"} for n in range(4)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reward.write_text("def reward(samples):\n    return [float(sum(sample.response_ids) % 7) for sample in samples]\n")
    tree: dict[str, Any] = {
        "run": {"name": "run", "folder": str(folder), "steps": 2, "save_every": 2},
        "model": {"path": str(model), "dtype": "float32"},
        "policy": {"threads_per_rank": 1, "optimizer": {"lr": 0.01}, "max_tokens_per_micro_batch": 640},
        "data": {"train": {"source": "jsonl", "path": str(rows)}, "prompt_key": "problem", "chat_template": "never"},
        "rollout": {"engine": "embedded", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4, "threads": 1},
        "rewards": [{"name": f"{reward}:reward"}],
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_config(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        {"layout": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "freeze": ["vision"]},
        pytest.param({"layout": {"pp": 2}}, marks=pytest.mark.exhaustive),
    ],
    ids=["frozen tower", "trained tower"],
)
def test_engine_and_trainer_hear_the_same_and_a_frozen_tower_keeps_its_bytes(
    policy: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    own = {"threads_per_rank": 1, "optimizer": {"lr": 0.01}, "max_tokens_per_micro_batch": 640}
    config = config_of(model, tmp_path, policy=own | policy)
    train(config)
    rows = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows)
    assert rows[0]["policy/grad_norm"] > 0
    [checkpoint] = (Path(config.run_folder) / "checkpoints").glob("step_*/policy")
    assert main(["convert", "export", str(checkpoint), str(tmp_path / "exported")]) == 0
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "exported" / "model.safetensors")
    tower = [name for name in before if name.startswith("audio_tower.")]
    for name in tower:
        is_frozen = "freeze" in policy and "proj1" not in name and "proj2" not in name
        assert torch.equal(before[name], after[name]) == is_frozen, name
    assert main(["samples", config.run_folder]) == 0


def test_servers_of_sglang_are_refused_for_a_model_that_hears(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="it serves the thinker only within a folder of the whole model"):
        check_engine(config_of(model, tmp_path, rollout={"engine": "sglang"}), "cpu")
