"""What the GPU tests compare is right: on a CPU, in float32, their helpers find Hugging Face's numbers under its names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from tests.themes.gpu.models import (
    gradients_of,
    hugging_face,
    hugging_face_answer,
    log_probs_of,
    objective,
    optimizer_state,
    role_for,
    units,
    write_folder,
)
from tests.world import World


def look(rank: int, world_size: int, folder: Path) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    from megarl.megatron.build import initialize_layout

    initialize_layout(Layout(), seed=1)
    role = role_for(folder)
    packed, alone, gradients = log_probs_of(role), log_probs_of(role, per_micro_batch=1), gradients_of(role)
    role.update([units()], objective)
    return packed, alone, gradients, optimizer_state(role)


# the experts of the last stand for those of the two before it, which tests/themes/parallel has too
MIXTURES = [pytest.param(family, marks=pytest.mark.exhaustive) for family in ("mixtral", "qwen3_moe")]


@pytest.mark.parametrize("family", ["qwen3", *MIXTURES, "deepseek_v3"])
def test_log_probs_gradients_and_moments_are_found_by_name(world: World, family: str, tmp_path: Path) -> None:
    write_folder(family, tmp_path / family)
    packed, alone, gradients, state = world.call(look, tmp_path / family, size=1)[0]
    log_probs, expected = hugging_face_answer(family, torch.float32, "cpu")
    torch.testing.assert_close(packed, log_probs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(alone, log_probs, rtol=1e-5, atol=2e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
    assert state.keys() == {f"{moment} {name}" for moment in ("param", "exp_avg", "exp_avg_sq") for name in expected}
    for name, weight in hugging_face(family).named_parameters():
        if f"param {name}" in state:
            assert 0 < (state[f"param {name}"] - weight).abs().max() <= 2e-3
