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
    ("kimi_linear", {"attention_bias": True}, "attention_bias is True"),
    ("kimi_linear", {"hidden_act": "situ"}, "hidden_act is 'situ'; it must be 'silu'"),
    ("kimi_linear", {"layer_types": [LINEAR_KIND, "sliding_attention"] * 2}, "layer_types names 'sliding_attention'"),
    ("kimi_linear", {"linear_num_heads": 0}, "linear_num_heads is 0; it must be a positive integer"),
    ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, r"gate_lower_bound is -5\.0; it must be False"),
    ("kimi_linear", {"mla_use_output_gate": True}, "mla_use_output_gate is True; it must be False"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False; it must be True"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'; it must be 'sigmoid'"),
    ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq is 2; it must be 1"),
    ("kimi_linear", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; it must be 0"),
    ("kimi_linear", {"moe_renormalize": False}, "norm_topk_prob is False; it must be True"),
    ("kimi_linear", {"n_shared_experts": 1}, "n_shared_experts and num_shared_experts say the same, but are"),
    (
        "kimi_linear",
        {"mlp_layer_types": ["dense", "moe"] * 2},
        "mlp_layer_types is .*; it must be 'dense' or 'sparse' for 4 layers",
    ),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}},
        "kda_layers and full_attn_layers must together have each number from 1 to num_hidden_layers=4 once",
    ),
    ("olmo_hybrid", {"attention_bias": True}, "attention_bias is True"),
    ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("olmo_hybrid", {"layer_types": [LINEAR_KIND] * 4}, "layer_types has layers of one kind; it must have both"),
    ("olmo_hybrid", {"layer_types": [LINEAR_KIND]}, "layer_types has 1 entries; it must have num_hidden_layers=4"),
    ("olmo_hybrid", {"linear_num_value_heads": 6}, "linear_num_key_heads is 4; it must divide linear_num_value_heads=6"),
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


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid"])
def test_linear_attention_is_split_by_key_heads_over_tensor_and_context_ranks(configs: Any, family: str) -> None:
    shape = shape_of(configs[family])
    with pytest.raises(ConfigError, match=r"cp is 4, which does not divide the 2 heads of layers .* 2 tensor ranks"):
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


KIMI_LAYERS = {
    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    "kda_layers": [number for number in range(1, 27) if number % 4],
    "head_dim": 128,
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
"""Of Kimi-Linear-48B-A3B, whose other sizes are transformers' defaults."""


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Qwen3Next", {}),
        ("Qwen3_5", {}),
        ("Qwen3_5Moe", {}),
        ("KimiLinear", {"linear_attn_config": KIMI_LAYERS}),
        ("OlmoHybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    ],
)
def test_the_map_of_a_large_config_has_every_parameter_of_transformers_model(name: str, given: dict[str, Any]) -> None:
    """The defaults are the sizes of Qwen3-Next-80B-A3B, Qwen3.5-9B, Qwen3.5-35B-A3B, Kimi-Linear-48B-A3B and OLMo-Hybrid-7B."""
    kind = f"{name}TextConfig" if name.startswith("Qwen3_5") else f"{name}Config"
    config = getattr(transformers, kind)(**given)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    hf_config = {"architectures": [f"{name}ForCausalLM"], **config.to_dict()}
    shapes = architecture_for(hf_config).weight_map(hf_config).hf_shapes()
    buffers = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert sum(map(prod, shapes.values())) == sum(value.numel() for value in (*model.parameters(), *buffers))


def test_the_spelling_of_the_hub_is_that_of_transformers(configs: Any) -> None:
    """Kimi-Linear: transformers writes config.json as the hub has it, but for the layers."""
    written = configs["kimi_linear"]
    named = {"num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 2, "model_max_length": 256}
    assert {name: written[name] for name in named} == named
    linear = {"kda_layers": [1, 3, 4], "full_attn_layers": [2], "head_dim": 6, "num_heads": 4, "short_conv_kernel_size": 4}
    others = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    as_on_the_hub = {name: value for name, value in written.items() if name not in others}
    as_on_the_hub |= {"linear_attn_config": linear, "first_k_dense_replace": 1}
    architecture = architecture_for(written)
    assert architecture.transformer_config_kwargs(as_on_the_hub) == architecture.transformer_config_kwargs(written)
    assert architecture.weight_map(as_on_the_hub) == architecture.weight_map(written)


@pytest.mark.parametrize(
    ("rope", "rotates"),
    [
        ({"rope_parameters": None}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_parameters": None, "rope_theta": None}, False),
        ({"rope_parameters": None, "rope_theta": 5e5}, True),
    ],
)
def test_olmo_hybrid_rotates_where_transformers_does(configs: Any, rope: dict[str, Any], rotates: bool) -> None:
    model = transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**transformers_fields(configs) | rope))
    assert (model.model.rotary_emb is not None) == rotates
    hf_config = configs["olmo_hybrid"] | rope
    kwargs = architecture_for(hf_config).transformer_config_kwargs(hf_config)
    assert ("no_rope_freq" not in kwargs) == rotates


def transformers_fields(configs: Any) -> dict[str, Any]:
    return {name: value for name, value in configs["olmo_hybrid"].items() if name not in ("architectures", "rope_parameters")}


def test_the_sentence_for_an_installation_without_the_option_knows_its_families() -> None:
    named = {family for family, option in registry.OPTION_OF_FAMILY.items() if option == "linear_attention"}
    assert named == {architecture.name for architecture in ARCHITECTURES}
