"""The config of `megarl eval`, which trains on nothing: neither training rows nor rewards for these have to be there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megarl.config.load import parse_config
from megarl.config.schema import Config
from megarl.config.yaml_tree import apply_overrides, read_yaml

NO_TRAINING_ROWS = {"source": "jsonl", "path": "no training rows"}
"""A stand-in for `data.train`, which an evaluation never reads."""


def load_to_evaluate(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a config as `load_config` does; `data.train` may be missing, and so may `rewards` where each set has its own.

    Raises:
        ConfigError: one sentence, as from `load_config`.
    """
    tree = apply_overrides(read_yaml(path), overrides)
    data = tree.get("data", {})
    if isinstance(data, dict) and "train" not in data and (tree.get("evaluations") or data.get("eval")):
        tree["data"] = data | {"train": NO_TRAINING_ROWS}
    return parse_config(tree, is_judged=False)
