"""FP8 settings that cannot work together, with this model or on this GPU are refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import parse_config
from megarl.config.fp8 import RECIPES, device_problem, token_multiple
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError, MegarlError
from megarl.models.check_layouts import check_models
from tests.config.smallest import RL, supervised

FP8 = {"model": {"path": "nowhere", "fp8": "hybrid"}}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.fp8=fp4"], ["model.fp8 is 'fp4'", "'none', 'hybrid' or 'e4m3'"]),
        (["model.fp8_recipe=nvfp4"], ["'delayed', 'tensorwise', 'blockwise' or 'mxfp8'"]),
        (["model.fp8_bf16_layers=[1]"], ["model.fp8_bf16_layers is [1]", "a list of 2 numbers"]),
        (
            ["model.fp8=none", "model.fp8_param=true"],
            ["model.fp8_param needs FP8 products", "set model.fp8 to 'hybrid' or 'e4m3'"],
        ),
        (
            ["model.fp8=none", "model.fp8_bf16_layers=[1, 0]"],
            ["model.fp8_bf16_layers needs FP8 products", "or remove model.fp8_bf16_layers"],
        ),
        (["model.layer_spec=reference"], ["model.fp8 is 'hybrid'", "model.layer_spec = 'transformer_engine'"]),
        (["model.layer_spec=local"], ["model.fp8 is 'hybrid'", "model.layer_spec = 'transformer_engine'"]),
        (["model.dtype=float32"], ["model.dtype is 'float32'", "'bfloat16'"]),
        (["model.fp8_recipe=delayed", "model.fp8_bf16_layers=[1, 1]"], ["model.fp8_bf16_layers is [1, 1]", "[0, 0]"]),
        (["model.fp8_recipe=delayed"], ["'delayed'", "the reference is never trained", "'tensorwise'"]),
        (
            ["model.fp8_recipe=delayed", "algorithm.kl.coef=0.0", "reward_model.path=judge"],
            ["'delayed'", "the reward model is never trained"],
        ),
        (
            ["model.fp8_param=true", "critic.optimizer.offload_fraction=1"],
            ["critic.optimizer.offload_fraction is 1", "(model.fp8_param)", "it must be 0, or remove model.fp8_param"],
        ),
        (
            ["model.fp8=none", "model.dtype=float32", "policy.optimizer.offload_fraction=0.5"],
            ["policy.optimizer.offload_fraction is 0.5", "'float32'", "0 or 1"],
        ),
        (["critic.optimizer.offload_fraction=0.5"], ["critic.optimizer.offload_fraction is 0.5", "value head", "0 or 1"]),
        (
            ["critic.optimizer={name: muon, offload_fraction: 1}"],
            ["critic.optimizer.offload_fraction is 1", "which is for AdamW alone", "it must be 0 with optimizer.name 'muon'"],
        ),
        (["policy.optimizer.offload_fraction=1.5"], ["policy.optimizer.offload_fraction is 1.5", "from 0 to 1"]),
    ],
)
def test_settings_that_contradict_each_other_are_named(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(apply_overrides(RL | FP8, overrides))
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.fp8_recipe=blockwise", "model.fp8=e4m3", "model.fp8_bf16_layers=[1, 2]", "model.fp8_param=true"],
        ["model.fp8_recipe=delayed", "algorithm.kl.coef=0.0"],
        ["model.fp8_recipe=delayed", "algorithm.kl.coef=0.0", "model.fp8_param=true"],
        ["model.layer_spec=transformer_engine", "policy.optimizer.offload_fraction=0.5", "critic.optimizer.offload_fraction=1"],
    ],
)
def test_settings_that_work_together_are_accepted(overrides: list[str]) -> None:
    config = parse_config(apply_overrides(RL | FP8, overrides))
    assert config.model.fp8 in ("hybrid", "e4m3")


def test_a_supervised_run_obeys_the_same_rules() -> None:
    assert supervised("model.fp8_recipe=delayed", **FP8).model.fp8_recipe == "delayed"
    with pytest.raises(ConfigError, match="the reference is never trained"):
        supervised("model.fp8_recipe=delayed", "objective.name=dpo", **FP8)
    part = ["policy.optimizer.offload_fraction=0.5"]
    assert supervised(*part, **FP8).policy.optimizer.offload_fraction == 0.5
    with pytest.raises(ConfigError, match="value head"):
        supervised(*part, "objective.name=reward_model", **FP8)


def model_folder(folder: Path, **sizes: Any) -> str:
    tree = {
        "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6, "head_dim": 32,
        "intermediate_size": 512, "vocab_size": 96, "max_position_embeddings": 128, "num_experts_per_tok": 2,
        "model_type": "qwen3_moe" if "num_experts" in sizes else "llama", **sizes,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tree))
    return str(folder)


@pytest.mark.parametrize(
    ("sizes", "overrides", "parts"),
    [
        (
            {"hidden_size": 264},
            [],
            ["needs multiples of 16, and the hidden size of the model of policy.layout is 264", "set model.fp8 to 'none'"],
        ),
        (
            {"hidden_size": 288},
            ["model.fp8_recipe=blockwise"],
            [
                "multiples of 128, and the hidden size of the model of policy.layout is 288",
                "to 'delayed', 'tensorwise' or 'mxfp8'",
            ],
        ),
        ({"head_dim": 2}, ["policy.layout.tp=2"], ["policy.layout.tp is 2", "attention width of 16", "it must be 1"]),
        (
            {},
            ["policy.layout.tp=8", "model.fp8_recipe=blockwise"],
            [
                "policy.layout.tp is 8",
                "splits the model's attention width of 256 into parts that are no multiple of 128",
                "it must be 1 or 2",
            ],
        ),
        (
            {"intermediate_size": 320},
            ["policy.layout.tp=4", "model.fp8_recipe=mxfp8"],
            ["policy.layout.tp is 4", "feed-forward width of 320", "it must be 1, 2, 5 or 10"],
        ),
        (
            {"num_experts": 4, "moe_intermediate_size": 24},
            [],
            ["multiples of 16, and the experts' feed-forward width of the model of policy.layout is 24"],
        ),
        ({}, ["reference.layout={tp: 8}", "model.fp8_recipe=mxfp8"], None),
        ({}, ["reference.layout={tp: 8}", "model.fp8_recipe=blockwise"], ["reference.layout.tp is 8"]),
        (
            {},
            ["policy.layout.pp=3", "model.fp8_bf16_layers=[3, 0]"],
            ["model.fp8_bf16_layers is [3, 0]", "the 2 layers of a pipeline stage of policy.layout", "from 0 to 2"],
        ),
        ({}, ["model.fp8_bf16_layers=[4, 2]"], ["model.fp8_bf16_layers is [4, 2]", "6 layers in FP8"]),
        ({}, ["policy.layout.pp=3", "model.fp8_bf16_layers=[2, 2]"], None),
    ],
)
def test_widths_and_layers_that_fp8_cannot_hold_are_named(
    tmp_path: Path, sizes: dict[str, Any], overrides: list[str], parts: list[str] | None
) -> None:
    path = model_folder(tmp_path / "model", **sizes)
    config = parse_config(apply_overrides(RL | FP8, [f"model.path={path}", *overrides]))
    if parts is None:
        check_models(config)
        return
    with pytest.raises(MegarlError) as caught:
        check_models(config)
    for part in parts:
        assert part in str(caught.value)


def test_a_width_that_is_too_odd_for_fp8_is_fine_without_it(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", hidden_size=264)
    check_models(parse_config(apply_overrides(RL | FP8, [f"model.path={path}", "model.fp8=none"])))


@pytest.mark.parametrize(
    ("gpu", "capability", "cuda", "can"),
    [
        ("A100", (8, 0), "13.0", []),
        ("L40", (8, 9), "12.4", ["delayed", "tensorwise"]),
        ("H100, old CUDA", (9, 0), "12.8", ["delayed", "tensorwise"]),
        ("H200", (9, 0), "12.9", ["delayed", "tensorwise", "blockwise"]),
        ("B200", (10, 0), "13.0", ["delayed", "tensorwise", "blockwise", "mxfp8"]),
        ("B300", (10, 3), "13.0", ["delayed", "tensorwise", "blockwise", "mxfp8"]),
        ("RTX 5090", (12, 0), "13.0", ["delayed", "tensorwise", "blockwise"]),
        ("CPU build of torch", (9, 0), None, []),
    ],
)
def test_a_recipe_runs_where_transformer_engine_says_it_does(
    gpu: str, capability: tuple[int, int], cuda: str | None, can: list[str]
) -> None:
    problems = {recipe: device_problem(recipe, capability, cuda) for recipe in RECIPES}
    assert [recipe for recipe, problem in problems.items() if problem is None] == can
    for recipe, problem in problems.items():
        assert problem is None or (recipe in problem and f"{capability[0]}.{capability[1]}" in problem)


def test_tokens_are_padded_to_the_recipes_block() -> None:
    assert {recipe: token_multiple("hybrid", recipe) for recipe in RECIPES} == {
        "delayed": 16,
        "tensorwise": 16,
        "blockwise": 128,
        "mxfp8": 32,
    }
    assert token_multiple("none", "blockwise") == 1
