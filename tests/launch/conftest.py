"""Configs of runs to submit, on a model folder that is only looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a config, weights of 4 kB, and a file where the tokenizer is looked for."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * 4096)
    return folder


@pytest.fixture
def rl_yaml(tmp_path: Path, model: Path) -> Path:
    """A GRPO run."""
    tree = {
        "run": {"name": "big", "folder": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "data": {"train": {"source": "reasoning_gym", "name": "chain_sum"}},
        "rollout": {"prompts_per_step": 48, "samples_per_prompt": 4},
        "rewards": [{"name": "exact_number"}],
    }
    path = tmp_path / "rl.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def sft_yaml(tmp_path: Path, model: Path) -> Path:
    """A run of supervised fine-tuning."""
    tree = {
        "run": {"name": "tuned", "folder": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "objective": {"name": "sft"},
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}, "rows_per_step": 48},
    }
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
