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


def config(*overrides: str, **sections: Any) -> Config:
    """A reinforcement-learning run with these sections, in place of its own, and fields overridden as on the command line."""
    return parse_config(apply_overrides(RL | sections, overrides))


def supervised(*overrides: str, **sections: Any) -> SupervisedConfig:
    """As `config`, a supervised run."""
    return parse_supervised_config(apply_overrides(SUPERVISED | sections, overrides))
