"""Training models that see: frozen parts keep their bytes, gradients may be reduced early, checkpoints move between layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.config.presets import ModelPart
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import architecture_for
from megarl.models.vision import part_of
from tests.megatron.seeing_ranks import resume, save, update_frozen, write_critic
from tests.seeing import SEEING, build_seeing_folder, pictures, units
from tests.world import World

SP = Layout(tp=2, sequence_parallel=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's folder with a media folder in it, built once."""
    root = tmp_path_factory.mktemp("seeing")

    def get(family: str) -> Path:
        if not (root / family).exists():
            build_seeing_folder(family, root / family)
            pictures(family, root / family / "media")
        return root / family

    return get


def joined(answers: list[dict[str, Any]], field: str) -> dict[str, Tensor]:
    return {name: tensor for answer in answers for name, tensor in answer[field].items()}


@pytest.mark.parametrize(
    ("family", "layout", "freeze", "more"),
    [
        ("qwen2_5_vl", Layout(), ("vision",), {}),
        ("qwen2_5_vl", Layout(dp=2), ("language",), {"recompute": "full"}),
        ("qwen2_5_vl", Layout(pp=2), ("vision", "projector"), {}),
        ("qwen3_vl", Layout(pp=2), ("language",), {}),
        ("qwen3_vl", SP, ("language", "vision"), {"recompute": "full"}),
        ("qwen3_vl", Layout(cp=2), ("projector",), {"recompute": "full"}),
        ("qwen2_vl", Layout(), (), {"dtype": "bfloat16"}),
        ("glm4v_moe", Layout(pp=2), ("vision",), {}),
        ("glm4v_moe", Layout(), ("projector",), {"recompute": "full"}),
        ("kimi_k25", Layout(pp=2), ("vision",), {}),
        ("kimi_k25", Layout(), ("projector",), {"recompute": "full"}),
    ],
)
def test_frozen_parts_keep_their_bytes_and_all_others_change(
    world: World, folder: Any, family: str, layout: Layout, freeze: tuple[ModelPart, ...], more: dict[str, Any]
) -> None:
    answers = world.call(update_frozen, folder(family), layout, units(family), freeze, more, size=layout.world_size)
    before, after = joined(answers, "before"), joined(answers, "after")
    assert before.keys() == after.keys()
    hub = {"model.visual.": "visual.", "vision_tower.": "visual.", "mm_projector.": "visual.merger."}
    for name, tensor in before.items():
        inside = next((own + name.removeprefix(prefix) for prefix, own in hub.items() if name.startswith(prefix)), name)
        never = name.endswith("e_score_correction_bias")  # it picks experts, and is not trained
        assert torch.equal(tensor, after[name]) == (never or part_of(inside) in freeze), name


@pytest.mark.parametrize("layout", [Layout(dp=2), SP])
def test_gradients_that_are_reduced_early_wait_for_no_picture(world: World, folder: Any, layout: Layout) -> None:
    """The last micro-batch shows none: every parameter of the tower still reports its gradient."""
    given = [*units("qwen2_5_vl")[1:3], *units("qwen2_5_vl")[:1], *units("qwen2_5_vl")[:1]]
    plain, early = (
        joined(
            world.call(update_frozen, folder("qwen2_5_vl"), layout, given, (), {"megatron": options}, size=layout.world_size),
            "after",
        )
        for options in ({}, {"overlap_grad_reduce": True})
    )
    for name, tensor in plain.items():
        assert torch.equal(tensor, early[name]), name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_checkpoint_of_a_model_that_sees_moves_between_layouts(
    world: World, folder: Any, family: str, tmp_path: Path
) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    written = world.call(save, folder(family), SP, units(family), str(target), size=2)
    for layout in (SP, Layout(pp=2), Layout(dp=2)):
        read = world.call(resume, folder(family), layout, units(family), str(target), size=2)
        for field in ("saved", "next"):
            expected, found = joined(written, field), joined(read, field)
            assert expected.keys() == found.keys()
            for name, tensor in expected.items():
                if field == "saved" or layout == SP:
                    assert torch.equal(found[name], tensor), (field, layout, name)
                else:
                    torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5, msg=f"{layout} {name}")


def test_a_checkpoint_of_a_model_with_frozen_parts_has_them_and_goes_on(world: World, folder: Any, tmp_path: Path) -> None:
    given, freeze = (folder("qwen2_5_vl"), Layout(dp=2), units("qwen2_5_vl")), ("vision",)
    (tmp_path / "checkpoint").mkdir()
    written = world.call(save, *given, str(tmp_path / "checkpoint"), freeze, size=2)
    read = world.call(resume, *given, str(tmp_path / "checkpoint"), freeze, size=2)
    for field in ("saved", "next"):
        expected, found = joined(written, field), joined(read, field)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v_moe", "kimi_k25"])
def test_a_critic_that_sees_is_written_and_read_again(world: World, folder: Any, family: str, tmp_path: Path) -> None:
    target = tmp_path / "critic"
    [(before, after), _] = world.call(write_critic, folder(family), Layout(dp=2), units(family), target, size=2)
    assert before.any()
    assert (before == after).all()
    written = HFFolder(target)
    assert written.config["architectures"] == [f"{SEEING[family].class_prefix}ForSequenceClassification"]
    written.check(architecture_for(written.config).weight_map(written.config))
    assert "lm_head.weight" not in written.names
