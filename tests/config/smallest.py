"""The smallest configs that are accepted. Nothing that they name is there: what reads no file may be asked of them."""

from __future__ import annotations

from typing import Any

from megarl.config import Config, SupervisedConfig, parse_config, parse_supervised_config
from megarl.config.yaml_tree import apply_overrides

RL: dict[str, Any] = {
    "model": {"path": "nowhere"},
    "data": {"train": {"name": "basic_arithmetic"}},
    "rewards": [{"name": "reasoning_gym"}],
}
SUPERVISED: dict[str, Any] = {
    "model": {"path": "nowhere"},
    "objective": {"name": "sft"},
    "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
}

WITHOUT_LIBRARIES = """
run: {name: a, steps: 3}
model: {path: nowhere, dtype: float32}
policy: {layout: {dp: 1}, optimizer: {lr: 1e-6}}
algorithm: {name: grpo, kl: {coef: 0.0}}
data: {train: {source: jsonl, path: rows.jsonl}, max_prompt_tokens: 8}
rollout: {engine: embedded, prompts_per_step: 4, samples_per_prompt: 2, max_new_tokens: 4}
rewards: [{name: exact_number, args: {answer_key: a}}]
"""
"""A small reinforcement-learning run as a file, which neither makes rows nor asks an engine of its own."""


def config(*overrides: str, **sections: Any) -> Config:
    """A reinforcement-learning run with these sections, in place of its own, and fields overridden as on the command line."""
    return parse_config(apply_overrides(RL | sections, overrides))


def supervised(*overrides: str, **sections: Any) -> SupervisedConfig:
    """As `config`, a supervised run."""
    return parse_supervised_config(apply_overrides(SUPERVISED | sections, overrides))
