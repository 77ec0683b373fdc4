"""The options of a role's section `megatron` reach megatron-core, and its defaults are fast on GPUs and plain on CPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.config.megatron_options import OWNED
from megarl.errors import ConfigError
from megarl.megatron.options import ModelOptions, OptimizerOptions
from tests import seeing
from tests.families import build_folder
from tests.megatron.kernels import fused_kernels
from tests.planning.test_memory import COMMON, MODELS
from tests.themes.parallel.worlds import MODES, micro_batches, objective
from tests.world import World

FUSIONS = ("apply_rope_fusion", "bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion")
MOE_FUSIONS = ("moe_permute_fusion", "moe_router_fusion")


def configs(rank: int, world_size: int, model: ModelOptions, hf_config: dict[str, Any]) -> Any:
    """(TransformerConfig, DDP config, OptimizerConfig) as dictionaries, or the sentence of why there are none."""
    from megarl.megatron.model_config import ddp_config, fuses_gradient_accumulation, transformer_config
    from megarl.megatron.optimizer import optimizer_config

    try:
        with fused_kernels():
            transformer = vars(transformer_config(model, hf_config))
        optimizer, ddp = vars(optimizer_config(OptimizerOptions(lr=1e-3), model)), vars(ddp_config(model))
    except ConfigError as error:
        return str(error)
    fused = fuses_gradient_accumulation(model)
    transformer["attention_backend"] = transformer["attention_backend"].name
    plain = {name: value for name, value in transformer.items() if isinstance(value, bool | int | float | str | list | None)}
    return plain | {"gradient_accumulation_fusion": fused}, ddp, {"pin_cpu_grads": optimizer["pin_cpu_grads"]}


def options(spec: str = "transformer_engine", **changes: Any) -> ModelOptions:
    return ModelOptions("unread", changes.pop("layout", Layout()), layer_spec=spec, dtype="bfloat16", **changes)


def test_options_reach_each_of_megatron_cores_configs(world: World) -> None:
    given = {
        "attention_backend": "flash",
        "cp_comm_type": "a2a",
        "batch_p2p_sync": True,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "recompute_modules": ["core_attn"],
        "overlap_grad_reduce": False,
        "bucket_size": 123,
        "pin_cpu_grads": False,
    }
    transformer, ddp, optimizer = world.call(
        configs, options(megatron=given, recompute="selective"), COMMON | MODELS["llama"], size=1
    )[0]
    found = ddp | optimizer | transformer
    assert {name: found[name] for name in given} == given


def test_kernels_that_count_one_position_are_never_used_by_models_that_see(world: World) -> None:
    hf_config = seeing.hf_config("qwen2_5_vl").to_dict()
    transformer, _, _ = world.call(configs, options(), hf_config, size=1)[0]
    assert not transformer["apply_rope_fusion"]
    [said] = world.call(configs, options(megatron={"apply_rope_fusion": True}), hf_config, size=1)
    assert said == (
        "policy.megatron.apply_rope_fusion is true, which would give the tokens of pictures wrong angles: "
        "its kernel counts one position for each token; it must be false"
    )


@pytest.mark.parametrize("family", [name for name in MODELS if name not in ("granite_hybrid", "nemotron_h")])  # refused there
def test_transformer_engine_fuses_and_overlaps_what_it_can(world: World, family: str) -> None:
    hf_config = COMMON | MODELS[family]
    transformer, ddp, _ = world.call(configs, options(recompute="selective"), hf_config, size=1)[0]
    of_latents = family.startswith("deepseek_v3") or family == "longcat_flash"
    experts = of_latents or family in ("qwen3_moe", "gpt_oss", "mimo_v2")
    # as the kernels do: not latents, no neighbouring pairs, no attention factor; and no biases of experts
    unlike = {
        "apply_rope_fusion": not of_latents and family not in ("glm4", "gpt_oss"),
        "bias_dropout_fusion": family != "gpt_oss",
    }
    assert {name: transformer[name] for name in FUSIONS} == dict.fromkeys(FUSIONS, True) | unlike
    assert {name: transformer[name] for name in MOE_FUSIONS} == dict.fromkeys(MOE_FUSIONS, experts)
    assert transformer["gradient_accumulation_fusion"]
    assert ddp["overlap_grad_reduce"]
    assert not transformer["batch_p2p_sync"]
    modules = ["mlp", "layernorm", *(["moe_act"] if experts else []), *(["mla_up_proj"] if of_latents else [])]
    assert transformer["recompute_modules"] == modules


def test_the_reference_layers_have_none_of_it(world: World) -> None:
    model, hf_config = options("reference", recompute="selective"), COMMON | MODELS["qwen3_moe"]
    transformer, ddp, _ = world.call(configs, model, hf_config, size=1)[0]
    names = (*FUSIONS, *MOE_FUSIONS, "moe_grouped_gemm")
    assert {name: transformer[name] for name in names} == dict.fromkeys(names, False)
    assert transformer["gradient_accumulation_fusion"]  # on a CPU, by megarl's own
    assert transformer["recompute_modules"] == ["core_attn"]
    assert not ddp["overlap_grad_reduce"]
    assert transformer["batch_p2p_sync"]


@pytest.mark.parametrize(
    ("spec", "given", "part"),
    [
        ("reference", {"apply_rope_fusion": True}, "apply_rope_fusion is true, which only Transformer Engine's"),
        ("transformer_engine", {"cache_mla_latents": True}, "which only a model with latent attention has"),
        ("transformer_engine", {"recompute_modules": ["mlpp"]}, "sets recompute_modules, which megatron-core refuses"),
    ],
)
def test_what_does_not_go_with_the_model_is_one_sentence(world: World, spec: str, given: dict[str, Any], part: str) -> None:
    answer = world.call(configs, options(spec, megatron=given, recompute="selective"), COMMON | MODELS["llama"], size=1)[0]
    assert isinstance(answer, str)
    assert part in answer
    assert "\n" not in answer


def names_that_megarl_sets(rank: int, world_size: int) -> dict[str, set[str]]:
    """What megarl passes to megatron-core's classes, by what a config may do about it."""
    from megarl.megatron import model_config, optimizer

    passed: set[str] = set()

    def remember(**fields: Any) -> Any:
        passed.update(fields)
        return SimpleNamespace()

    classes = ("TransformerConfig", "MLATransformerConfig", "DistributedDataParallelConfig")
    with pytest.MonkeyPatch.context() as patch:
        for name in classes:
            patch.setattr(model_config, name, remember)
        patch.setattr(optimizer, "OptimizerConfig", remember)
        patch.setattr(model_config, "fields_for", lambda *unused, kind: {})
        patch.setattr(optimizer, "fields_for", lambda *unused, kind: {})
        for family in MODELS.values():
            model_config.transformer_config(options(), COMMON | family)
        model_config.ddp_config(options())
        optimizer.optimizer_config(OptimizerOptions(lr=1e-3), options())
        defaults = set(model_config._defaults(options(recompute="selective"), has_experts=True, is_latent=True))
    defaults |= {"overlap_grad_reduce", "grad_reduce_in_fp32", "check_for_nan_in_grad"}
    return {"passed": passed, "defaults": defaults | model_config.ROTARY_KERNELS}


def test_whatever_megarl_sets_is_refused_or_a_default(world: World) -> None:
    names = world.call(names_that_megarl_sets, size=1)[0]
    assert names["passed"] - names["defaults"] <= OWNED.keys()
    assert names["defaults"] & OWNED.keys() == {"moe_grouped_gemm"}  # layer specs and weights' names follow from it


def fused_layers(rank: int, world_size: int) -> list[bool]:
    from megarl.megatron.build import fuse_gradient_accumulation

    engine_like, other = torch.nn.Identity(), torch.nn.Identity()
    engine_like.fuse_wgrad_accumulation = False  # type: ignore[assignment]
    fuse_gradient_accumulation(torch.nn.Sequential(engine_like, other))
    return [bool(engine_like.fuse_wgrad_accumulation), hasattr(other, "fuse_wgrad_accumulation")]


def test_gradient_accumulation_is_fused_on_layers_that_know_it(world: World) -> None:
    assert world.call(fused_layers, size=1)[0] == [True, False]


def updated(rank: int, world_size: int, folder: Path, layout: Layout, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights after updates whose numbers of micro-batches differ, as they do from step to step of a run."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=1)
    role = RankModel(ModelOptions(str(folder), layout, megatron=given), OptimizerOptions(lr=1e-2, eps=1e-3, clip_grad=0.0))
    if given:
        assert len(role.chunks[0].bucket_groups) > 1 or layout.coords(rank).pp  # one bucket would overlap with nothing
    for mode in ("unpacked", "packed", "unpacked"):
        role.forward(micro_batches(MODES["packed"], layout.dp)[layout.coords(rank).dp])
        role.update(micro_batches(MODES[mode], layout.dp)[layout.coords(rank).dp], objective)
    return {name: tensor.clone() for name, tensor in role.export()}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        # dense layers and dp are in the second as well, stages in the fourth, and ranks of cp reduce as those of dp do
        pytest.param("qwen2", Layout(dp=2), marks=pytest.mark.exhaustive),
        ("qwen3_moe", Layout(dp=2, ep=2)),
        pytest.param("llama", Layout(dp=2, pp=2), marks=pytest.mark.exhaustive),
        ("llama", Layout(dp=1, pp=2, vpp=2)),
        pytest.param("llama", Layout(cp=2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_reduction_during_the_backward_pass_gives_the_same_weights(
    world: World, tmp_path: Path, family: str, layout: Layout
) -> None:
    build_folder(family, tmp_path)
    plain = world.call(updated, tmp_path, layout, {}, size=layout.world_size)
    overlapped = world.call(
        updated, tmp_path, layout, {"overlap_grad_reduce": True, "bucket_size": 1000}, size=layout.world_size
    )
    assert plain[0] or plain[-1]
    for before, after in zip(plain, overlapped, strict=True):
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-7, msg=name)


def test_a_fused_router_would_leave_out_the_routes(world: World) -> None:
    hf_config = COMMON | MODELS["qwen3_moe"]
    refused = options(replays_routes=True, megatron={"moe_router_fusion": True})
    assert "policy.megatron.moe_router_fusion is true, which would leave out policy.routing.replay" in str(
        world.call(configs, refused, hf_config, size=1)[0]
    )
    assert world.call(configs, options(replays_routes=True), hf_config, size=1)[0][0]["moe_router_fusion"] is False
    assert world.call(configs, options(), hf_config, size=1)[0][0]["moe_router_fusion"] is True
