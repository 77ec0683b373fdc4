"""The configs that the benchmarks make load: a removed field is not found out months later, or taken for a bad input."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import load_config, parse_config
from megarl.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def each_row(learning: Any) -> list[dict[str, Any]]:
    kinds = {"estimator": learning.ESTIMATORS, "loss": learning.LOSSES}
    return [learning.settings(kind, name, 0, 1, "runs") for kind, names in kinds.items() for name in names]


@pytest.mark.parametrize(
    ("module", "trees"),
    [
        ("bad_input_cases", lambda module: [module.BASE]),
        ("fault_runs", lambda module: [module.config(Path("runs"), 8000, 8, family) for family in module.FAMILIES]),
        ("learning", each_row),
        ("distillation", lambda module: [module.settings(form, 0, 1, "runs") for form in module.FORMS]),
    ],
)
def test_the_configs_load(module: str, trees: Callable[[Any], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for tree in trees(importlib.import_module(module)):
        try:
            parse_config(tree)
        except ConfigError as error:
            if "which this installation does not have" in str(error):
                pytest.skip(str(error))
            raise


def test_the_step_loads() -> None:
    load_config(BENCHMARKS / "step.yaml")
