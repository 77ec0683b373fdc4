"""megatron-core's options with Transformer Engine's real layers: what a GPU gets by default, and what a config may set.

Models are built, with their optimizers, in a process that has Transformer Engine and no GPU; nothing computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from megarl.config.layout import Layout
from megarl.config.megatron_fields import megatron_fields
from megarl.config.megatron_options import OWNED
from megarl.errors import ConfigError
from megarl.megatron.options import ModelOptions, OptimizerOptions
from tests.families import UNDER_TRANSFORMER_ENGINE, VARIANTS, build_folder
from tests.world import World

pytestmark = pytest.mark.slow

REFUSED: dict[str, str] = {
    # a switch, or a field and its value: a part of what megatron-core says
    "ep_overlap_early_attn_memory_release": "overlap_moe_expert_parallel_comm must be enabled",
    "overlap_p2p_comm_warmup_flush": "only compatible with overlap_p2p_comm",
    "apply_query_key_layer_scaling": "environment variable NVTE_APPLY_QK_LAYER_SCALING is None",
    "fp8_output_proj": "must be used together with fp8 mode",
    "moe_enable_deepep": "only supported with flex token dispatcher",
    "moe_flex_dispatcher_backend=ncclep": "requires moe_token_dispatcher_type='flex'",
    "batch_invariant_mode": "only supports FlashAttention",
    "use_te_activation_func": "bias_activation_fusion and use_te_activation_func cannot be both true",
    "fine_grained_activation_offloading": "AssertionError",
    "moe_paged_stash": "requires moe_expert_rank_capacity_factor",
    "inference_fuse_tp_communication": "only supported for inference_optimized",
    "inference_disable_triton_nvls_kernels": "only supported for inference_optimized",
}
NOT_HERE = {
    "nccl_ub": "compiles an allocator against NCCL's and CUDA's headers",
    "moe_token_dispatcher_type": "'flex' is made of packages of kernels for networks",
}
"""Fields that only a machine with more than Transformer Engine can try."""


def role(folder: Path, **options: Any) -> Any:
    """What a GPU trains by default, under `options`."""
    from megarl.megatron.rank_model import RankModel

    model = ModelOptions(str(folder), Layout(), layer_spec="transformer_engine", dtype="bfloat16", **options)
    return RankModel(model, OptimizerOptions(lr=1e-3))


def defaults(rank: int, world_size: int, folder: Path, recompute: str) -> dict[str, Any]:
    """The config of a model as it is by default, and whether its layers add their gradients up themselves."""
    from megarl.megatron.build import initialize_layout
    from tests.megatron.engine_on_cpu import a_gpu

    initialize_layout(Layout(), seed=1)
    with a_gpu():
        chunk = role(folder, recompute=recompute).chunks[0]
    fused = {module.fuse_wgrad_accumulation for module in chunk.modules() if hasattr(module, "fuse_wgrad_accumulation")}
    names = ("apply_rope_fusion", "bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "batch_p2p_sync")
    names += ("moe_permute_fusion", "moe_router_fusion", "moe_grouped_gemm", "recompute_granularity", "recompute_modules")
    return {name: getattr(chunk.config, name) for name in names} | {"gradients are added up by layers": fused}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", UNDER_TRANSFORMER_ENGINE)
def test_what_a_gpu_gets_by_default_is_accepted(engine_world: World, family: str, recompute: str, tmp_path: Path) -> None:
    build_folder(family, tmp_path)
    found = engine_world.call(defaults, tmp_path, recompute, size=1)[0]
    latent, experts = "kv_lora_rank" in VARIANTS[family].settings, VARIANTS[family].num_experts is not None
    scaled = VARIANTS[family].settings.get("rope_parameters", {}).get("rope_type") in ("yarn", "longrope")
    modules = ["mlp", "layernorm", *(["moe_act"] if experts else []), *(["mla_up_proj"] if latent else [])]
    expected = {
        # its kernel has neither an attention factor nor neighbouring pairs
        "apply_rope_fusion": not latent and not scaled and VARIANTS[family].class_prefix != "Glm4",
        "moe_permute_fusion": experts,
        "moe_router_fusion": experts,
        "moe_grouped_gemm": experts,
        "batch_p2p_sync": False,
        "recompute_granularity": None if recompute == "none" else recompute,
        "gradients are added up by layers": {True},
        "bias_dropout_fusion": not family.startswith("gpt_oss"),
        **dict.fromkeys(("bias_activation_fusion", "masked_softmax_fusion"), True),
    }
    assert {name: found[name] for name in expected} == expected
    if recompute == "selective":
        assert found["recompute_modules"] == modules


def answers(rank: int, world_size: int, folder: Path, tries: list[dict[str, Any]]) -> list[str]:
    """For each section `megatron` an empty string if the model is built, else the sentence."""
    from megarl.megatron.build import initialize_layout
    from tests.megatron.engine_on_cpu import a_gpu

    initialize_layout(Layout(), seed=1)
    said = []
    for given in tries:
        with a_gpu():
            try:
                role(folder, megatron=given, recompute="selective" if "recompute_modules" in given else "none")
            except ConfigError as error:
                said.append(str(error))
            else:
                said.append("")
    return said


def values(annotation: Any) -> tuple[Any, ...]:
    """Every value of a field of this type, if there are few."""
    if annotation is bool:
        return True, False
    choices = [
        choice for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal for choice in get_args(part)
    ]
    return tuple(choices)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_every_switch_is_accepted_or_refused_in_one_sentence(engine_world: World, family: str, tmp_path: Path) -> None:
    build_folder(family, tmp_path)
    fields = {name: field for name, field in megatron_fields().items() if name not in OWNED.keys() | NOT_HERE.keys()}
    tries = [{name: value} for name, field in fields.items() for value in values(field.annotation)]
    assert len(tries) > 150
    for given, sentence in zip(tries, engine_world.call(answers, tmp_path, tries, size=1, timeout_s=300)[0], strict=True):
        ((name, value),) = given.items()
        assert "\n" not in sentence
        if "only a model with latent attention has" in sentence:
            continue
        why = REFUSED.get(name if value is True else f"{name}={value}", "")
        assert bool(sentence) == bool(why), f"{name}={value}: {sentence or 'accepted'}"
        assert why in sentence


TOGETHER: list[dict[str, Any]] = [
    {"use_te_activation_func": True, "bias_activation_fusion": False},
    {"overlap_p2p_comm_warmup_flush": False, "cp_comm_type": "a2a"},
    {"cp_comm_type": ["a2a"] * 4},
    {"recompute_modules": ["core_attn"]},
    {"recompute_modules": ["mlp", "layernorm"]},
    {"gradient_accumulation_fusion": False, "apply_rope_fusion": False, "overlap_grad_reduce": False},
    {"bucket_size": 1000, "pin_cpu_grads": False},
    {"batch_invariant_mode": True, "attention_backend": "flash", "flash_attention_version": 3},
]


def test_options_that_go_together_are_accepted(engine_world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path)
    assert engine_world.call(answers, tmp_path, TOGETHER, size=1)[0] == [""] * len(TOGETHER)


def activations(rank: int, world_size: int, folder: Path) -> set[str]:
    from megarl.megatron.build import initialize_layout
    from tests.megatron.engine_on_cpu import a_gpu

    initialize_layout(Layout(), seed=1)
    with a_gpu():
        chunk = role(folder, megatron={"use_te_activation_func": True, "bias_activation_fusion": False}).chunks[0]
    return {type(module.activation_func).__name__ for module in chunk.modules() if hasattr(module, "activation_func")}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_transformer_engines_activation_is_in_the_layers_that_are_told_to_use_it(
    engine_world: World, family: str, tmp_path: Path
) -> None:
    build_folder(family, tmp_path)
    assert engine_world.call(activations, tmp_path, size=1)[0] == {"SwiGLU"}
