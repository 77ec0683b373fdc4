"""Recipes of the cookbook, as they are installed, run against `megarl serve`, and learn."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.conftest import BENCHMARKS

MINUTES = 20
"""For the longest recipe, on a machine that does other work beside."""


@pytest.fixture(scope="module")
def recipes() -> Iterator[ModuleType]:
    """The benchmark's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("served_recipes")


@pytest.fixture(scope="module")
def server(recipes: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """One server for all recipes: its address, and the folder in which recipes work."""
    if (reason := recipes.why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cookbook")
    with recipes.serving(recipes.config_of(recipes.prepare(folder), folder), folder) as url:
        yield url, folder


NAMES = (
    "sl_basic", "sl_loop", "rl_basic", "rl_loop", "math_rl (arithmetic)", "preference.dpo", "preference.shorter",
    "distillation.on_policy", "multiplayer_rl.guess_number", "rl_numerics_check",
)  # fmt: skip
NOT_OF_THE_TRAINING = {"preference.dpo", "sl_basic", "sl_loop", "rl_loop"}
"""Recipes that do not compare the sampler with the trainer."""


def test_every_recipe_is_tried(recipes: ModuleType) -> None:
    assert tuple(recipes.RECIPES) == NAMES


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(MINUTES * 60)
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_ends_and_learns(name: str, recipes: ModuleType, server: tuple[str, Path]) -> None:
    url, folder = server
    found = recipes.run(name, url, folder, timeout_s=MINUTES * 60)
    first, last = ends(found)
    assert {"up": last > first, "down": last < first, "": True}[recipes.RECIPES[name].moves], found
    if name in NOT_OF_THE_TRAINING:
        assert "kl_sample_train" not in found
    else:
        assert found["kl_sample_train"] < 1e-4, found


def ends(found: dict[str, Any]) -> tuple[float, float]:
    """The means of a figure over the first and the last quarter of its steps."""
    values = found["values"]
    quarter = max(1, len(values) // 4)
    return mean(values[:quarter]), mean(values[-quarter:])
