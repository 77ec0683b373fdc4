"""`run.deterministic`: the ranks compute with such kernels alone, and on a CPU get the very numbers they get without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import parse_config
from megarl.config.layout import Layout
from megarl.platform.deterministic import ENVIRONMENT
from tests.config.smallest import RL
from tests.families import build_folder
from tests.themes.parallel.worlds import MODES, micro_batches, objective
from tests.world import World


def train(rank: int, world_size: int, folder: Path, deterministic: bool) -> dict[str, Any]:
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    layout = Layout(dp=2, ep=2)
    initialize_layout(layout, seed=1)
    before = {name: os.environ.pop(name, None) for name in ENVIRONMENT}
    try:
        options = ModelOptions(str(folder), layout, deterministic=deterministic)
        role = RankModel(options, OptimizerOptions(lr=1e-2))
        for _ in range(2):
            role.update(micro_batches(MODES["packed"], layout.dp)[layout.coords(rank).dp], objective)
        return {
            "mode": torch.are_deterministic_algorithms_enabled(),
            "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
            "megatron": role.chunks[0].config.deterministic_mode,
            "weights": {name: tensor.clone() for name, tensor in role.export()},
        }
    finally:
        torch.use_deterministic_algorithms(False)
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


def test_deterministic_ranks_use_deterministic_kernels_alone(world: World, tmp_path: Path) -> None:
    build_folder("mixtral", tmp_path / "model")
    plain, exact = (world.call(train, tmp_path / "model", choice, size=2) for choice in (False, True))
    for answer in plain:
        assert (answer["mode"], answer["megatron"]) == (False, False)
        assert set(answer["environment"].values()) == {None}
    for answer, other in zip(exact, plain, strict=True):
        assert (answer["mode"], answer["megatron"]) == (True, True)
        assert answer["environment"] == ENVIRONMENT
        for name, tensor in answer["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name


@pytest.mark.parametrize("value", [True, False])
def test_the_config_says_whether(value: bool) -> None:
    assert parse_config(RL | {"run": {"deterministic": value}}).run.deterministic is value
