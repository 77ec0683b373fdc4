"""A tower that a GPU cannot train deterministically is refused before it is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl import platform
from megarl.config.layout import Layout
from megarl.errors import ConfigError
from megarl.megatron.options import ModelOptions


@pytest.fixture
def glm_tower() -> torch.nn.Module:
    """The part of GLM-4V's tower that interpolates positions, as transformers has it."""
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from transformers.models.glm4v.modeling_glm4v import Glm4vVisionEmbeddings

    tower = torch.nn.Module()
    tower.embeddings = Glm4vVisionEmbeddings(Glm4vVisionConfig(hidden_size=8, image_size=28, patch_size=14))
    return tower


def checked(tower: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool = True, **options: Any) -> None:
    from megarl.options.pictures.model_part import check_deterministic

    monkeypatch.setattr(platform, "cuda_present", lambda: on_gpu)
    check_deterministic(tower, ModelOptions("folder", Layout(), **({"deterministic": True} | options)))


def test_interpolated_positions_are_not_trained_deterministically_on_a_gpu(
    glm_tower: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"run.deterministic is true, which has no gradient .*; it must be false, unless"):
        checked(glm_tower, monkeypatch)


@pytest.mark.parametrize(
    "options", [{"on_gpu": False}, {"deterministic": False}, {"trainable": False}, {"freeze": ("vision",)}], ids=str
)
def test_all_else_is_accepted(glm_tower: torch.nn.Module, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    checked(glm_tower, monkeypatch, **options)


def test_towers_without_interpolation_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(torch.nn.Linear(1, 1), monkeypatch)
