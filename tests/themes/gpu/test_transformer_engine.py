"""Transformer Engine's layers against transformers, packed sequences, and FP8 against BF16, on a real GPU.

BF16 has 8 significant bits. Two right implementations round in different places, so against float32 they make errors of the
same size, not the same errors: what is asked of megarl is an error of at most twice that of transformers in BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.fp8 import RECIPES, device_problem, token_multiple
from tests.megatron.moments import assert_equal
from tests.megatron.saving import load_role, save_role
from tests.themes.gpu.models import (
    gradients_of,
    hugging_face,
    hugging_face_answer,
    log_probs_of,
    objective,
    optimizer_state,
    role_for,
    root_mean_square,
    units,
)

TE = {"layer_spec": "transformer_engine", "dtype": "bfloat16"}
REFERENCE = {"layer_spec": "reference", "dtype": "bfloat16"}
Folders = Callable[[str], Path]


def fp8(recipe: str, **more: Any) -> dict[str, Any]:
    """Options of a role in FP8; skips where this GPU cannot run the recipe."""
    problem = device_problem(recipe, torch.cuda.get_device_capability(), torch.version.cuda)
    if problem is not None:
        pytest.skip(problem)
    kind = "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3"
    return TE | {"fp8": kind, "fp8_recipe": recipe, "token_multiple": token_multiple(kind, recipe)} | more


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_probs_and_gradients_are_hugging_faces_up_to_bf16(transformer_engine: Any, folder_of: Folders, family: str) -> None:
    exact, exact_gradients = hugging_face_answer(family, torch.float32, "cuda")
    rounded, rounded_gradients = hugging_face_answer(family, torch.bfloat16, "cuda")
    role = role_for(folder_of(family), **TE)
    assert root_mean_square(log_probs_of(role) - exact) <= 2 * root_mean_square(rounded - exact)
    gradients = gradients_of(role)
    assert gradients.keys() == exact_gradients.keys()
    for name, expected in exact_gradients.items():
        error, allowed = gradients[name] - expected, rounded_gradients[name] - expected
        assert root_mean_square(error) <= 2 * root_mean_square(allowed) + 1e-3 * root_mean_square(expected), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_experts_and_latent_attention_agree_with_hugging_face_up_to_bf16(
    transformer_engine: Any, folder_of: Folders, family: str
) -> None:
    # A router near a tie may choose other experts in BF16, and then a token is far off: the median does not mind.
    exact, exact_gradients = hugging_face_answer(family, torch.float32, "cuda")
    rounded, rounded_gradients = hugging_face_answer(family, torch.bfloat16, "cuda")
    role = role_for(folder_of(family), **TE)
    assert float((log_probs_of(role) - exact).abs().median()) <= 2 * float((rounded - exact).abs().median())
    gradients = gradients_of(role)
    assert gradients.keys() == exact_gradients.keys()
    for name, expected in exact_gradients.items():
        if ".experts." not in name and "gate." not in name:  # whose gradients follow the choices
            similarity = torch.cosine_similarity(gradients[name].flatten(), expected.flatten(), dim=0)
            of_rounded = torch.cosine_similarity(rounded_gradients[name].flatten(), expected.flatten(), dim=0)
            assert 1 - similarity <= 4 * (1 - of_rounded) + 1e-3, f"{name}: cosine {similarity:.4f}, {of_rounded:.4f}"


def test_a_checkpoint_of_the_reference_layers_is_read_by_transformer_engines_and_back(
    transformer_engine: Any, folder_of: Folders, tmp_path: Path
) -> None:
    for source, target in ((REFERENCE, TE), (TE, REFERENCE)):
        first, second = role_for(folder_of("llama"), **source), role_for(folder_of("llama"), **target)
        first.update([units()], objective)
        save_role(first, str(tmp_path / source["layer_spec"]))
        load_role(second, str(tmp_path / source["layer_spec"]))
        assert_equal(optimizer_state(second), optimizer_state(first))


def test_fused_options_compute_what_the_unfused_ones_do(transformer_engine: Any, folder_of: Folders) -> None:
    exact, exact_gradients = hugging_face_answer("llama", torch.float32, "cuda")
    unfused = {"apply_rope_fusion": False, "gradient_accumulation_fusion": False, "bias_activation_fusion": False}
    error = {}
    for name, megatron in (("fused", {}), ("unfused", unfused)):
        role = role_for(folder_of("llama"), megatron=megatron, **TE)
        gradients = gradients_of(role)
        off = torch.cat([(gradients[key] - expected).flatten() for key, expected in exact_gradients.items()])
        error[name] = root_mean_square(log_probs_of(role) - exact), root_mean_square(off)
    for fused, plain in zip(error["fused"], error["unfused"], strict=True):
        assert 0 < fused <= 1.5 * plain


def test_packed_responses_score_as_they_do_alone(transformer_engine: Any, folder_of: Folders) -> None:
    rounded, exact = (hugging_face_answer("llama", dtype, "cuda")[0] for dtype in (torch.bfloat16, torch.float32))
    role = role_for(folder_of("llama"), trainable=False, **TE)
    alone, packed = log_probs_of(role, per_micro_batch=1), log_probs_of(role, per_micro_batch=len(units()))
    assert root_mean_square(packed - alone) <= root_mean_square(rounded - exact)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_fp8_log_probs_are_near_those_of_bf16(transformer_engine: Any, folder_of: Folders, recipe: str) -> None:
    # E4M3 has 4 significant bits, 16 times fewer steps than BF16: that much more error is what FP8 costs, and some must show.
    options = fp8(recipe)
    exact, _ = hugging_face_answer("llama", torch.float32, "cuda")
    of_bf16 = root_mean_square(log_probs_of(role_for(folder_of("llama"), trainable=False, **TE)) - exact)
    role = role_for(folder_of("llama"), **options)
    gradients = gradients_of(role)  # delayed scaling learns its scales from it
    of_fp8 = root_mean_square(log_probs_of(role) - exact)
    assert of_bf16 < of_fp8 <= 2 * 16 * of_bf16
    for name, expected in hugging_face_answer("llama", torch.float32, "cuda")[1].items():
        similarity = torch.cosine_similarity(gradients[name].flatten(), expected.flatten(), dim=0)
        assert similarity > 0.9, f"{name}: cosine {similarity:.3f}"


def test_layers_in_bf16_bring_fp8_nearer_to_bf16(transformer_engine: Any, folder_of: Folders) -> None:
    bf16 = log_probs_of(role_for(folder_of("llama"), trainable=False, **TE))
    off = {}
    for kept in ((0, 0), (1, 2)):
        role = role_for(folder_of("llama"), trainable=False, **fp8("tensorwise", fp8_bf16_layers=kept))
        off[kept] = root_mean_square(log_probs_of(role) - bf16)
    assert 0 < off[1, 2] < off[0, 0]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_weights_in_fp8_start_from_and_are_saved_with_a_full_copy(
    transformer_engine: Any, folder_of: Folders, recipe: str, tmp_path: Path
) -> None:

    options = fp8(recipe, fp8_param=True)
    role = role_for(folder_of("llama"), **options)
    before = log_probs_of(role)
    role.update([units()], objective)
    saved = optimizer_state(role)
    for name, weight in hugging_face("llama").named_parameters():
        assert float((saved[f"param {name}"] - weight).abs().max()) <= 2e-3, f"{name} moved further than one step of Adam"
    save_role(role, str(tmp_path / "checkpoint"))
    trained = log_probs_of(role)
    again = role_for(folder_of("llama"), **options)
    load_role(again, str(tmp_path / "checkpoint"))
    assert_equal(optimizer_state(again), saved)
    assert root_mean_square(log_probs_of(again) - trained) < root_mean_square(trained - before)
