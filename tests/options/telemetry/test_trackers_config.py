"""The section `trackers`: what may be named there, and what nobody would read is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import AnyConfig, parse_any
from megarl.errors import ConfigError

RL = {"model": {"path": "m"}, "data": {"train": {"name": "basic_arithmetic"}}, "rewards": [{"name": "reasoning_gym"}]}
SFT = {"model": {"path": "m"}, "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}}, "objective": {"name": "sft"}}
RUNS = {"rl": RL, "sft": SFT}


@pytest.mark.parametrize("kind", [*RUNS])
def test_classes_of_ones_own_stand_beside_names(kind: str) -> None:
    own = "here/mine.py:Mine"
    trackers = {"backends": ["wandb", own, "package.module:Class"], "args": {own: {"k": 1}}}
    config: AnyConfig = parse_any(RUNS[kind] | {"trackers": trackers})
    assert config.trackers.backends == ("wandb", own, "package.module:Class")
    assert config.trackers.args == {own: {"k": 1}}
    assert (config.trackers.prometheus.port, config.trackers.opentelemetry) == (None, False)


@pytest.mark.parametrize("kind", [*RUNS])
@pytest.mark.parametrize(
    ("trackers", "sentence"),
    [
        (
            {"backends": ["tensorbord"]},
            r"trackers\.backends is \['tensorbord'\]; it must be a list of 'tensorboard', 'wandb', 'mlflow' or 'swanlab' or "
            r"'package\.module:Class' or 'path/to/file\.py:Class'",
        ),
        ({"backends": ["mine.py"]}, r"trackers\.backends is \['mine\.py'\]; it must be a list of"),
        ({"backends": "wandb"}, r"trackers\.backends is 'wandb'; it must be a list of .*, such as \[wandb\]"),
        (
            {"args": {"mine.py:Mine": {}}},
            r"trackers\.args is 'mine\.py:Mine', which is no tracker of your own in trackers\.backends; it must be left out",
        ),
        (
            {"backends": ["a.py:A", "wandb"], "args": {"wandb": {}}},
            r"trackers\.args is 'wandb', which is no tracker of your own in trackers\.backends; it must be one of a\.py:A$",
        ),
        (
            {"backends": ["a.py:A"], "args": {"a.py:A": [1]}},
            r"trackers\.args\['a\.py:A'\] is .*; it must be a mapping of keyword arguments",
        ),
        ({"prometheus": {"port": 65536}}, r"prometheus\.port is 65536; it must be a whole number from 0 to 65535 or null"),
        ({"prometheus": {"port": "9464"}}, r"prometheus\.port is '9464'; it must be a whole number"),
        (
            {"prometheus": {"host": "0.0.0.0"}},
            r"prometheus\.host needs a port: set trackers\.prometheus\.port, or remove trackers\.prometheus\.host",
        ),
        ({"prometheus": {"token_file": "t"}}, r"trackers\.prometheus\.token_file needs a port"),
        ({"prometheus": {"prot": 1}}, r"trackers\.prometheus\.prot is not a config field \(did you mean '.*port'\?\)"),
    ],
)
def test_what_cannot_be_is_a_sentence(kind: str, trackers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_any(RUNS[kind] | {"trackers": trackers})
