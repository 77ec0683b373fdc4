"""Families with state spaces: what is refused, how they are split, how many parameters they have, and their old spellings."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.errors import ConfigError, ModelError
from megarl.models import registry
from megarl.models.check_layouts import _check_layout
from megarl.models.flops import FlopsModel
from megarl.models.registry import architecture_for
from megarl.models.shape import shape_of
from megarl.options.state_spaces.families import ARCHITECTURES
from tests.families import FAMILIES, VARIANTS, hugging_face

MAMBA, ATTENTION = "linear_attention", "full_attention"
GRANITE, NEMOTRON = "granite_hybrid", "nemotron_h"
REFUSED = [
    (GRANITE, {"layer_types": [MAMBA, "sliding_attention"] * 2}, "layer_types names 'sliding_attention'"),
    (GRANITE, {"layer_types": [MAMBA]}, "layer_types has 1 entries; it must have num_hidden_layers=4"),
    (GRANITE, {"layer_types": "MM"}, "layer_types is 'MM'; it must be a list"),
    (GRANITE, {"mamba_d_head": 7}, r"mamba_d_head 7; their product must be mamba_expand \* hidden_size = 64"),
    (GRANITE, {"mamba_n_groups": 3}, "3 groups of 8 heads"),
    (GRANITE, {"mamba_d_conv": 0}, "mamba_d_conv is 0; it must be a positive integer"),
    (GRANITE, {"mamba_proj_bias": True}, "mamba_proj_bias is True; it must be False"),
    (GRANITE, {"attention_bias": True}, "attention_bias is True"),
    (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; it must be null, 'nope' or 'rope'"),
    (GRANITE, {"normalization_function": "layernorm"}, "normalization_function is 'layernorm'; it must be 'rmsnorm'"),
    (GRANITE, {"time_step_limit": [0.1, 0.1]}, "time_step_limit is .* the first at least 0 and the smaller one"),
    (GRANITE, {"time_step_limit": [0, {"__float__": "NaN"}]}, "time_step_limit is .* two numbers"),
    (GRANITE, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (GRANITE, {"num_local_experts": -1}, "num_local_experts is -1; it must be an integer of at least 0"),
    (GRANITE, {"logits_scaling": 0}, "logits_scaling is 0; it must be a number above 0"),
    (NEMOTRON, {"layers_block_type": [MAMBA, "moee", "mlp", "mlp"]}, "layers_block_type names 'moee'; its entries must be"),
    (NEMOTRON, {"layers_block_type": None, "hybrid_override_pattern": "M-*X"}, "has 'X' in place 3; its letters must be M"),
    (NEMOTRON, {"layers_block_type": None, "hybrid_override_pattern": 3}, "hybrid_override_pattern is 3; it must be a text"),
    (NEMOTRON, {"num_hidden_layers": 5}, "layers_block_type has 4 layers; it must have num_hidden_layers=5"),
    (NEMOTRON, {"use_bias": True}, "use_bias is True; it must be False"),
    (NEMOTRON, {"mlp_bias": True}, "mlp_bias is True"),
    (NEMOTRON, {"attention_bias": True}, "attention_bias is True"),
    (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; it must be 'relu2'"),
    (NEMOTRON, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; it must be 'silu'"),
    (NEMOTRON, {"sliding_window": 8}, "sliding_window is 8; it must be null"),
    (NEMOTRON, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    (NEMOTRON, {"residual_in_fp32": True}, "residual_in_fp32 is True"),
    (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts is 2; it must be 1"),
    (NEMOTRON, {"norm_topk_prob": False}, "norm_topk_prob is False"),
    (NEMOTRON, {"moe_latent_size": 0}, "moe_latent_size is 0; it must be a positive integer"),
]


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """config.json of each family's tiny model."""
    models = {name: hugging_face(name) for name, family in VARIANTS.items() if family.option == "state_spaces"}
    return {name: model.config.to_dict() | {"architectures": [type(model).__name__]} for name, model in models.items()}


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(
    configs: Any, family: str, change: dict[str, Any], message: str
) -> None:
    hf_config = configs[family] | change
    with pytest.raises(ModelError, match=message):
        architecture_for(hf_config).transformer_config_kwargs(hf_config)


@pytest.mark.parametrize("family", [GRANITE, NEMOTRON])
def test_state_spaces_are_split_by_heads_over_tensor_and_context_ranks(configs: Any, family: str) -> None:
    shape = shape_of(configs[family])
    with pytest.raises(ConfigError, match=r"policy\.layout\.cp is 3, which does not divide the \d heads of layers with states"):
        _check_layout("policy.layout", Layout(cp=3), shape)
    _check_layout("policy.layout", Layout(cp=2), shape)
    with pytest.raises(ConfigError, match=r"tp is 16, which does not divide .* heads of layers with states"):
        _check_layout("policy.layout", Layout(tp=16, sequence_parallel=True), replace(shape, heads=16, kv_heads=16))
    _check_layout("policy.layout", Layout(pp=2), shape)


def test_a_pattern_is_read_as_the_list_and_old_names_as_the_new_ones(configs: Any) -> None:
    new = configs[NEMOTRON]
    renamed = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "time_step_min": "mamba_dt_min"}
    old = {renamed.get(field, field): value for field, value in new.items() if field != "layers_block_type"}
    old |= {"hybrid_override_pattern": "EM*-", "rope_theta": 10000, "partial_rotary_factor": 1.0, "num_hidden_layers": 4}
    older = new | {"layers_block_type": ["moe", "mamba", "attention", "mlp"]}
    family = architecture_for(new)
    for config in (old, older):
        assert family.transformer_config_kwargs(config) == family.transformer_config_kwargs(new)
        assert family.gpt_kwargs(config) == family.gpt_kwargs(new)
        assert family.weight_map(config) == family.weight_map(new)
        assert (family.linear(config), family.traits(config)) == (family.linear(new), family.traits(new))


@pytest.mark.parametrize("name", ["GraniteMoeHybrid", "NemotronH"])
def test_what_a_config_leaves_out_is_what_transformers_fills_in(name: str) -> None:
    config = getattr(transformers, f"{name}Config")
    bare: dict[str, Any] = {"model_type": config.model_type, "architectures": [f"{name}ForCausalLM"]}
    given: dict[str, Any] = {}
    if name == "GraniteMoeHybrid":
        given = {"hidden_size": 4096, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 32}
        given |= {"num_key_value_heads": 8, "vocab_size": 100, "max_position_embeddings": 2048}
    filled = config(**given).to_dict() | bare
    family = architecture_for(bare)
    assert family.transformer_config_kwargs(bare | given) == family.transformer_config_kwargs(filled)
    assert family.gpt_kwargs(bare | given) == family.gpt_kwargs(filled)
    assert family.weight_map(bare | given).hf_shapes() == family.weight_map(filled).hf_shapes()
    assert family.linear(bare | given) == family.linear(filled)


GRANITE_4_H_TINY = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 6,
    "rms_norm_eps": 1e-5,
}
GRANITE_4_H_MICRO = GRANITE_4_H_TINY | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 64,
}
NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 262144,
}
NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_hidden_layers": 52,
    "max_position_embeddings": 8192,
}
PUBLISHED = [
    (GRANITE_4_H_TINY, "GraniteMoeHybrid", 6.94e9),
    (GRANITE_4_H_MICRO, "GraniteMoeHybrid", 3.19e9),
    (NEMOTRON_3_NANO, "NemotronH", 31.58e9),
    (NEMOTRON_H_8B, "NemotronH", 8.10e9),
]


@pytest.mark.parametrize(("hf_config", "name", "published"), PUBLISHED, ids=["h-tiny", "h-micro", "3-nano", "h-8b"])
def test_a_large_model_has_the_parameters_of_transformers_model_and_about_as_many_as_published(
    hf_config: dict[str, Any], name: str, published: float
) -> None:
    shapes = architecture_for(hf_config).weight_map(hf_config).hf_shapes()
    config = getattr(transformers, f"{name}Config")(**hf_config)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    bias = sum(tensor.numel() for key, tensor in model.named_buffers() if key.endswith("e_score_correction_bias"))
    tied = model.lm_head.weight.numel() if hf_config.get("tie_word_embeddings") else 0
    untied = 0 if model.lm_head.weight is model.model.get_input_embeddings().weight else tied
    assert sum(map(prod, shapes.values())) == sum(p.numel() for p in model.parameters()) + bias - untied
    assert sum(map(prod, shapes.values())) == pytest.approx(published, rel=2e-3)


def test_operations_count_each_half_of_a_layer_where_it_is(configs: Any) -> None:
    """Nemotron-H's tiny model, written out: experts in a latent, a Mamba-2 layer, attention, an MLP."""
    hidden, latent = 32, 20
    experts = hidden * 8 + 3 * 2 * latent * 8 + 2 * hidden * 12 + 2 * hidden * latent
    inner, shared = 8 * 6, 2 * 12
    mamba = hidden * (inner + (inner + 2 * shared) + 8) + inner * hidden + (inner + 2 * shared) * 4 + 2 * inner * 12
    attention = hidden * (4 * 12 + 2 * 2 * 12) + 4 * 12 * hidden
    mlp = 2 * hidden * 24
    found = FlopsModel.of(shape_of(configs[NEMOTRON]))
    assert found.per_token == 2 * (experts + mamba + attention + mlp)
    assert found.per_pair == 2 * 4 * 2 * 12


def test_steps_are_limited_as_transformers_limits_them(configs: Any) -> None:
    def limits(family: str, **change: Any) -> Any:
        return architecture_for(configs[family]).linear(configs[family] | change).steps

    assert limits(GRANITE, time_step_limit=None) == limits(GRANITE, time_step_limit=[0.0, inf]) == (0.0, inf)
    assert limits(GRANITE, time_step_limit=[0.1, 2]) == (0.1, 2.0)
    assert limits(GRANITE, time_step_limit=[0.0, {"__float__": "Infinity"}]) == (0.0, inf)
    assert limits(NEMOTRON, time_step_limit=[0.5, 0.6], time_step_min=0.25) == (0.25, inf)


def test_the_sentence_for_an_installation_without_the_option_knows_its_families() -> None:
    named = {family for family, option in registry.OPTION_OF_FAMILY.items() if option == "state_spaces"}
    assert named == {architecture.name for architecture in ARCHITECTURES}
    assert {FAMILIES[family].option for family in (GRANITE, NEMOTRON)} == {"state_spaces"}


def test_other_layers_are_refused(tmp_path: Path) -> None:
    from megarl.options.state_spaces.attention_variant import put_into

    with pytest.raises(
        ModelError, match=r"Mamba-2 layers, .* model\.layer_spec is 'transformer_engine'; it must be 'reference'"
    ):
        put_into(None, "transformer_engine", None)  # type: ignore[arg-type]
