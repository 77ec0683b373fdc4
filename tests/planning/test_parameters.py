"""Parameter counts are those of the model that megatron-core builds, rank by rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.layout import Layout
from megarl.models.registry import load_hf_config
from megarl.models.shape import ModelShape, shape_of
from megarl.planning.parameters import stage_parameters
from tests.families import FAMILIES, VARIANTS
from tests.families.family import SIZES
from tests.planning.ranks import Case, meta_counts
from tests.world import World

MODELS = Path(__file__).parents[2] / "examples/models"

LAYOUTS = (
    Layout(),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2, cp=2, dp=2),
    Layout(pp=3, first_stage_layers=1, last_stage_layers=1),
)
EXPERT_LAYOUTS = (
    Layout(),
    Layout(tp=2, pp=2, etp=2, sequence_parallel=True),
    Layout(dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
    Layout(dp=4, ep=2, etp=2),
)
LARGE = {
    "llama-3.1-405b": Layout(tp=8, pp=16, first_stage_layers=7, last_stage_layers=7),
    "deepseek-v3": Layout(tp=4, pp=8, dp=32, ep=32, sequence_parallel=True, first_stage_layers=7, last_stage_layers=6),
}


def config_of(family: str) -> dict[str, Any]:
    """The `config.json` of a tests' family."""
    import transformers

    entry = VARIANTS[family]
    config = getattr(transformers, entry.config_class)(**(SIZES | {"pad_token_id": None} | entry.settings))
    return config.to_dict() | {"architectures": [f"{entry.class_prefix}ForCausalLM"]}


@pytest.fixture(scope="module")
def check(world: World) -> Callable[[list[Case]], None]:
    """Compares the parameters of each case with those of the built model."""

    def compare(cases: list[Case]) -> None:
        for (layout, config, head), counted in zip(cases, world.call(meta_counts, cases, size=1)[0], strict=True):
            stages = stage_parameters(shape_of(config), layout, value_head=head == "value")
            both_ends = 1 if layout.world_size == layout.pp else 2
            assert [stage.trained for stage in stages for _ in range(both_ends)] == counted, (layout, config["architectures"])

    return compare


def test_counts_are_those_of_the_built_model_for_every_family(check: Callable[[list[Case]], None]) -> None:
    check(
        [
            (layout, config_of(family), "log_probs")
            for family, entry in VARIANTS.items()
            if family in FAMILIES or family.endswith(("tied", "plain"))
            for layout in (EXPERT_LAYOUTS if entry.num_experts else LAYOUTS)
            if (layout.etp == 1 or family != "gpt_oss") and not (entry.kind["one_stage"] and layout.pp > 1)
        ]
    )


def test_a_value_head_takes_the_place_of_the_vocabulary(check: Callable[[list[Case]], None]) -> None:
    check([(Layout(tp=2, pp=2), config_of(family), "value") for family in ("llama", "qwen2")])


def test_counts_of_large_models_are_exact(check: Callable[[list[Case]], None]) -> None:
    cases = []
    for model, layout in LARGE.items():
        config = load_hf_config(MODELS / model)
        config.pop("quantization_config", None)
        cases.append((layout, config, "log_probs"))
    check(cases)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("llama-3.1-405b", 405.853),
        ("qwen3-32b", 32.762),
        ("qwen3-235b-a22b", 235.094),
        ("deepseek-v3", 671.026),
        ("kimi-k2", 1026.408),
        ("glm-4.6", 352.798),
        ("qwen3.5-27b", 26.896),
        ("qwen3.5-35b-a3b", 34.661),
        ("qwen3.5-397b-a17b", 396.346),
        ("gemma-3-27b", 27.009),
        ("olmo-3-32b", 32.234),
        ("seed-oss-36b", 36.151),
    ],
)
def test_a_model_has_as_many_parameters_as_its_makers_say(model: str, billions: float) -> None:
    (only,) = stage_parameters(ModelShape.read(MODELS / model), Layout())
    assert only.trained / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("qwen2-vl-2b", 2_208_985_600),
        ("qwen2-vl-7b", 8_291_375_616),
        ("qwen2.5-vl-3b", 3_754_622_976),
        ("qwen2.5-vl-7b", 8_292_166_656),
        ("qwen2.5-vl-32b", 33_452_718_336),
        ("qwen2.5-vl-72b", 73_410_777_344),
        ("qwen3-vl-30b-a3b", 31_070_754_032),
        ("kimi-k2.5", 1_026_879_376_368),  # experts as they are before INT4
    ],
)
def test_a_model_that_sees_has_as_many_parameters_as_its_safetensors_files_on_the_hub(model: str, parameters: int) -> None:
    (only,) = stage_parameters(ModelShape.read(MODELS / model), Layout())
    assert only.trained + only.buffers == parameters  # buffers: biases that pick experts
