"""FP8 and offloading settings reach megatron-core's configs, which agree with megarl on what is possible."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.config import parse_config
from megarl.config.layout import Layout
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError
from megarl.megatron import options as megatron_options
from megarl.megatron.options import ModelOptions, OptimizerOptions, choose_layer_spec, untested_pair
from megarl.models.check_layouts import check_models
from tests.config.smallest import RL
from tests.megatron.kernels import fused_kernels
from tests.world import World

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
BASE = RL | {"model": {"path": "set by the test", "fp8": "hybrid"}, "algorithm": {"kl": {"coef": 0.0}}}


def options_for(**changes: Any) -> ModelOptions:
    return ModelOptions("unread", changes.pop("layout", Layout()), layer_spec="transformer_engine", dtype="bfloat16", **changes)


def megatron_configs(rank: int, world_size: int, models: list[ModelOptions], optimizer: OptimizerOptions) -> list[Any]:
    """For each of `models`: (TransformerConfig, DDP config, OptimizerConfig) as dictionaries, or the error of making them."""
    from megatron.core.optimizer import optimizer_config as of_megatron

    from megarl.megatron.model_config import ddp_config, transformer_config
    from megarl.megatron.optimizer import optimizer_config

    answers: list[Any] = []
    for model in models:
        try:
            with fused_kernels():
                config = transformer_config(model, HF_CONFIG)
        except ValueError as error:
            answers.append(str(error))
            continue
        fields = {name: value for name, value in vars(config).items() if "fp8" in name or "bf16" in name}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(of_megatron, "is_te_min_version", lambda version: True)  # cannot compare where TE is absent
            answers.append((fields, asdict(ddp_config(model)), vars(optimizer_config(optimizer, model))))
    return answers


def test_every_recipe_reaches_megatron_core(world: World) -> None:
    models = [options_for(fp8="hybrid", fp8_recipe=recipe) for recipe in RECIPES]
    models += [options_for(fp8="e4m3", fp8_recipe=recipe, fp8_param=True) for recipe in RECIPES]
    answers = world.call(megatron_configs, models, OptimizerOptions(lr=1e-3), size=1)[0]
    for model, (transformer, ddp, optimizer) in zip(models, answers, strict=True):
        assert transformer["fp8"] == model.fp8
        assert transformer["fp8_recipe"] == model.fp8_recipe
        assert transformer["fp8_param"] is model.fp8_param
        assert transformer["first_last_layers_bf16"] is False
        assert ddp["fp8_param_gather"] is model.fp8_param
        assert optimizer["fp8_recipe"] == model.fp8_recipe
        reuses = model.fp8_param and model.fp8_recipe == "mxfp8"
        assert ddp["reuse_grad_buf_for_mxfp8_param_ag"] is reuses
        assert optimizer["reuse_grad_buf_for_mxfp8_param_ag"] is reuses
        assert optimizer["optimizer_cpu_offload"] is False


def test_without_fp8_nothing_is_quantised(world: World) -> None:
    transformer, ddp, optimizer = world.call(megatron_configs, [options_for()], OptimizerOptions(lr=1e-3), size=1)[0][0]
    assert transformer["fp8"] is None
    assert not transformer["fp8_param"]
    assert not ddp["fp8_param_gather"]
    assert optimizer["fp8_recipe"] is None


def test_layers_that_stay_in_bf16_are_counted_from_both_ends(world: World) -> None:
    model = options_for(fp8="e4m3", fp8_recipe="blockwise", fp8_bf16_layers=(1, 2), layout=Layout(pp=2))
    transformer, _, _ = world.call(megatron_configs, [model], OptimizerOptions(lr=1e-3), size=1)[0][0]
    assert transformer["first_last_layers_bf16"] is True
    assert transformer["num_layers_at_start_in_bf16"] == 1
    assert transformer["num_layers_at_end_in_bf16"] == 2


def test_what_the_config_accepts_megatron_core_accepts(world: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    accepted: list[ModelOptions] = []
    refused = 0
    for recipe, param, layers, pp in itertools.product(RECIPES, (False, True), ((0, 0), (1, 1), (0, 2), (3, 0)), (1, 2)):
        overrides = [f"model.path={tmp_path}", f"model.fp8_recipe={recipe}", f"model.fp8_param={str(param).lower()}"]
        overrides += [f"model.fp8_bf16_layers={list(layers)}", f"policy.layout.pp={pp}"]
        model = options_for(fp8="hybrid", fp8_recipe=recipe, fp8_param=param, fp8_bf16_layers=layers, layout=Layout(pp=pp))
        try:
            check_models(parse_config(apply_overrides(BASE, overrides)))
            accepted.append(model)
        except ConfigError:
            refused += 1
            answer = world.call(megatron_configs, [model], OptimizerOptions(lr=1e-3), size=1)[0][0]
            assert isinstance(answer, str), f"megatron-core would have run {model}"
    answers = world.call(megatron_configs, accepted, OptimizerOptions(lr=1e-3), size=1)[0]
    assert [answer for answer in answers if isinstance(answer, str)] == []
    assert (len(accepted), refused) == (46, 18)


def test_offloading_reaches_megatron_core(world: World) -> None:
    options = OptimizerOptions(lr=1e-3, offload_fraction=0.5)
    _, _, optimizer = world.call(megatron_configs, [options_for()], options, size=1)[0][0]
    assert optimizer["optimizer_cpu_offload"] is True
    assert optimizer["optimizer_offload_fraction"] == 0.5
    assert optimizer["use_precision_aware_optimizer"] is True


class RecordingGroup:
    """Stands where a group of ranks does and keeps what the driver sends."""

    name, layout = "policy", Layout()

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def call(self, method: Any, *arguments: Any, **deadline: Any) -> list[str]:
        self.sent.append(arguments)
        return ["an Adam"]


@pytest.mark.parametrize(("recipe", "multiple"), [("tensorwise", 16), ("mxfp8", 32), ("blockwise", 128)])
def test_the_ranks_are_told_the_recipe_and_its_padding(recipe: str, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.workers.role_specs import role_specs
    from megarl.workers.roles import Roles

    group: Any = RecordingGroup()
    overrides = [f"model.fp8_recipe={recipe}", "model.fp8_bf16_layers=[1, 1]", "policy.optimizer.offload_fraction=0.25"]
    overrides.append("policy.share_prefix=false")
    config = parse_config(apply_overrides(BASE, overrides))
    flops: Any = None
    roles = Roles(config, role_specs(config), {"policy": group}, "transformer_engine", flops, sampling=None, updates=10)
    roles.load("policy")
    _, model, optimizer = group.sent[0]
    assert model.token_multiple == multiple
    assert (model.fp8, model.fp8_recipe, model.fp8_param, model.fp8_bf16_layers) == ("hybrid", recipe, False, (1, 1))
    assert optimizer.offload_fraction == 0.25
    spec = f"layer spec transformer_engine in FP8 (hybrid, {recipe})"
    for installed, warning in (("0.19.2", ""), ("0.16.1", f" (warning: {untested_pair('transformer_engine', '0.16.1')})")):
        monkeypatch.setattr("megarl.workers.roles.version", lambda name, installed=installed: installed)
        assert roles.describe() == f"{spec}{warning}, shared prefixes computed for each response\noptimizer an Adam"


def test_only_transformer_engine_with_an_older_megatron_core_is_warned_of() -> None:
    assert untested_pair("reference", "0.16.1") is None
    assert untested_pair("transformer_engine", "0.19.0") is None
    assert untested_pair("transformer_engine", "1.0.0") is None
    assert "megatron-core 0.18.9 is not tested" in str(untested_pair("transformer_engine", "0.18.9"))
    (pinned,) = re.findall(r"^megatron-core==(.+)$", Path("requirements/constraints-gpu.txt").read_text(), re.M)
    assert untested_pair("transformer_engine", pinned) is None  # what install-gpu.sh installs


def test_fp8_without_transformer_engine_is_refused_where_the_platform_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_options, "has_transformer_engine", lambda: False)
    assert choose_layer_spec("auto", "cuda") == "reference"
    for platform_name, why in (("cpu", "there is no GPU here"), ("cuda", "transformer_engine cannot be imported here")):
        with pytest.raises(ConfigError, match=f"model.fp8 is 'e4m3', but {why}; it must be 'none'"):
            choose_layer_spec("auto", platform_name, "e4m3")
    monkeypatch.setattr(megatron_options, "has_transformer_engine", lambda: True)
    assert choose_layer_spec("auto", "cuda", "e4m3") == "transformer_engine"
    assert choose_layer_spec("auto", "cuda", dtype="float32") == "reference", "it has no fused attention in float32"


def test_a_rank_on_the_wrong_gpu_says_what_the_recipe_needs(world: World) -> None:
    answer = world.call(on_a_hopper, options_for(fp8="e4m3", fp8_recipe="mxfp8"), size=1)[0]
    assert answer == (
        "model.fp8_recipe is 'mxfp8', which needs Blackwell of compute capability 10; this GPU has compute capability 9.0 "
        "under CUDA 13.0; set model.fp8 to 'none'"
    )
    assert world.call(on_a_hopper, options_for(fp8="e4m3", fp8_recipe="blockwise"), size=1)[0] is None


def on_a_hopper(rank: int, world_size: int, model: ModelOptions) -> str | None:
    import torch

    from megarl.megatron.model_config import transformer_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        patch.setattr(torch.version, "cuda", "13.0")
        try:
            with fused_kernels():
                transformer_config(model, HF_CONFIG)
        except ConfigError as error:
            return str(error)
    return None
