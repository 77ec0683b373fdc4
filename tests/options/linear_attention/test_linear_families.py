"""Families with linear attention: what is refused, how they are split, and how many parameters they have."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.errors import ConfigError, ModelError
from megarl.models import registry
from megarl.models.check_layouts import _check_layout
from megarl.models.registry import architecture_for
from megarl.models.shape import shape_of
from megarl.options.linear_attention.families import ARCHITECTURES
from tests.families import FAMILIES, hugging_face

LINEAR_KIND = "linear_attention"
REFUSED = [
    ("qwen3_next", {"attention_bias": True}, "attention_bias is True"),
    ("qwen3_next", {"layer_types": [LINEAR_KIND, "sliding_attention"] * 2}, "layer_types names 'sliding_attention'"),
    ("qwen3_next", {"layer_types": [LINEAR_KIND]}, "layer_types has 1 entries; it must have num_hidden_layers=4"),
    ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads is 3; it must divide linear_num_value_heads=8"),
    ("qwen3_next", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; it must be a positive integer"),
    ("qwen3_next", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate is False; it must be True"),
    ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; it must be 'silu'"),
    ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("qwen3_5", {"mlp_bias": True}, "mlp_bias is True"),
]


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """config.json of each family's tiny model."""
    models = {name: hugging_face(name) for name, family in FAMILIES.items() if family.comes_with == "linear_attention"}
    return {name: model.config.to_dict() | {"architectures": [type(model).__name__]} for name, model in models.items()}


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(
    configs: Any, family: str, change: dict[str, Any], message: str
) -> None:
    hf_config = configs[family] | change
    with pytest.raises(ModelError, match=message):
        architecture_for(hf_config).transformer_config_kwargs(hf_config)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_linear_attention_is_split_by_key_heads_over_tensor_and_context_ranks(configs: Any, family: str) -> None:
    shape = shape_of(configs[family])
    with pytest.raises(ConfigError, match=r"cp is 4, which does not divide the 2 key heads of .* 2 tensor ranks"):
        _check_layout("policy.layout", Layout(tp=2, cp=4, etp=2, sequence_parallel=True), replace(shape, heads=8, kv_heads=8))
    _check_layout("policy.layout", Layout(tp=2, cp=2, etp=2, sequence_parallel=True), shape)
    with pytest.raises(ConfigError, match=r"tp is 8, which does not divide .* 4 heads of layers with states"):
        _check_layout("policy.layout", Layout(tp=8, sequence_parallel=True), replace(shape, heads=8, kv_heads=8))
    _check_layout("policy.layout", Layout(pp=2), shape)


QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
}


def test_a_large_model_has_as_many_parameters_as_published() -> None:
    shapes = architecture_for(QWEN3_NEXT_80B).weight_map(QWEN3_NEXT_80B).hf_shapes()
    assert sum(map(prod, shapes.values())) / 1e9 == pytest.approx(79.674, abs=1e-3)


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe"])
def test_the_map_of_transformers_default_config_has_every_parameter_of_its_model(name: str) -> None:
    """The defaults are the sizes of Qwen3-Next-80B-A3B, Qwen3.5-9B and Qwen3.5-35B-A3B."""
    kind = f"{name}Config" if name == "Qwen3Next" else f"{name}TextConfig"
    config = getattr(transformers, kind)()
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    hf_config = {"architectures": [f"{name}ForCausalLM"], **config.to_dict()}
    shapes = architecture_for(hf_config).weight_map(hf_config).hf_shapes()
    assert sum(map(prod, shapes.values())) == sum(parameter.numel() for parameter in model.parameters())


def test_the_sentence_for_an_installation_without_the_option_knows_its_families() -> None:
    named = {family for family, option in registry.OPTION_OF_FAMILY.items() if option == "linear_attention"}
    assert named == {architecture.name for architecture in ARCHITECTURES}
