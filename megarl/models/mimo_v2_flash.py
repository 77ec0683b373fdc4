"""MiMo-V2-Flash: windows in most layers, which have sinks, more KV heads and other frequencies, and DeepSeek-V3's experts.

Heads of values are not as wide as those of keys, and are multiplied by a number; a part of a head rotates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig, HubNames, SglangFacts, ValueHeads
from megarl.models.hf_fields import positive, refuse, refuse_biases, size, with_defaults
from megarl.models.layer_ropes import LayerHeads, LayerRope, rope_of_windows, with_rope_of_full_layers
from megarl.models.packings import Copy
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.models.windows import FULL, SLIDING, sliding_layers

DEFAULTS: dict[str, Any] = {
    "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_routed_experts": 256, "sliding_window": 128,
}  # fmt: skip
"""transformers' defaults for fields that are missing."""
VALUE_SCALE = 0.707
THETAS = {FULL: 5e6, SLIDING: 1e4}
ROTATED = 0.334
PERIOD = 6
IN_WINDOWS = 2
"""KV heads of layers with a window, by those of the others, as transformers has them."""
OF_PUBLISHED: dict[str, Any] = {
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_shared_experts": 0,
}  # fmt: skip
"""Fields of published configs that transformers does not read, with the only values that it has a model for."""
NOT_SERVED = "megarl has not compared its servers of this family with training; rollout.engine 'embedded' serves it"


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config in transformers' fields, with its defaults; its rotary parameters are those of layers without a window.

    Raises:
        ModelError: rotary parameters are not by kind of layer, or a field of published configs says what transformers does
            not compute.
    """
    return with_rope_of_full_layers(_filled(hf_config), full_theta=THETAS[FULL])


def _filled(hf_config: HFConfig) -> HFConfig:
    filled = with_defaults(hf_config, DEFAULTS)
    layers = range(size(filled, "num_hidden_layers"))
    filled.setdefault("layer_types", [FULL if not layer or (layer + 1) % PERIOD == 0 else SLIDING for layer in layers])
    filled.setdefault("mlp_layer_types", [moe.MLP_KINDS[int(layer > 0)] for layer in layers])
    _check_published(filled)
    if not filled.get("rope_parameters"):
        filled["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in THETAS.items()}
    for field in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        filled.pop(field, None)
    filled["rope_parameters"] = {
        kind: {"partial_rotary_factor": ROTATED, **parameters}
        if isinstance(parameters, dict) and parameters.get("rope_type", "default") == "default"
        else parameters
        for kind, parameters in dict(filled["rope_parameters"]).items()
    }
    return filled


def _check_published(hf_config: HFConfig) -> None:
    """Raise ModelError if a field that the hub's configs have says something else than transformers computes."""
    why = "so is what transformers computes"
    said = {
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in hf_config["layer_types"]],
        "moe_layer_freq": [int(kind == moe.MLP_KINDS[1]) for kind in hf_config["mlp_layer_types"]],
        "swa_num_attention_heads": size(hf_config, "num_attention_heads"),
        "swa_num_key_value_heads": IN_WINDOWS * size(hf_config, "num_key_value_heads"),
        "swa_head_dim": size(hf_config, "head_dim"),
        "swa_v_head_dim": size(hf_config, "v_head_dim"),
        "sliding_window_size": hf_config["sliding_window"],
        "layernorm_epsilon": hf_config["rms_norm_eps"],
        **OF_PUBLISHED,
    }
    if not hf_config.get("rope_parameters"):
        said |= {"rope_theta": THETAS[FULL], "swa_rope_theta": THETAS[SLIDING], "partial_rotary_factor": ROTATED}
        refuse(hf_config, "rope_scaling", None, why)
    for field, value in said.items():
        refuse(hf_config, field, value, why)


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with windows, sinks and experts; what layers with a window have of their own is elsewhere.

    Raises:
        ModelError: biases, another router than DeepSeek-V3's, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    experts, sliding = _experts(hf_config), sliding_layers(hf_config)
    return (
        dense.transformer_config_kwargs(hf_config, sizes, sliding)
        | {"softmax_type": "learnable" if sliding else "vanilla", "hetereogenous_dist_checkpoint": True}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.sigmoid_router_kwargs(hf_config, experts)
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The rules of both kinds of attention, dense layers, and experts with their bias.

    Layers for multi-token prediction are carried as they are.
    """
    experts, sliding = _experts(hf_config), sliding_layers(hf_config) or frozenset()
    in_windows = replace(sizes, num_groups=IN_WINDOWS * sizes.num_groups)
    attention: list[Rule] = []
    for of_kind, layers in ((sizes, frozenset(range(sizes.num_layers)) - sliding), (in_windows, sliding)):
        attention += dense.attention_rules(of_kind, value_dim=size(hf_config, "v_head_dim"), layers=layers) if layers else ()
    if sliding:
        name, hf_name = "self_attention.core_attention.softmax_offset", "self_attn.attention_sink_bias"
        sinks = Copy((sizes.num_heads,), axis=0)
        attention.append(Rule(dense.LAYER + name, (dense.HF_LAYER + hf_name,), sinks, layers=sliding))
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, expert_bias=True)
    return moe.weight_map(sizes, experts, attention, of_experts, left_out=("model.mtp.",))


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    layers = moe.listed_layers(hf_config, 1)
    return moe.MoeSizes.from_hf(
        hf_config, layers, experts_fields=("n_routed_experts", "num_local_experts"), ffn_field="moe_intermediate_size"
    )


def layer_rope(hf_config: HFConfig) -> LayerRope:
    """The layers with a window: their rotation, and their heads. Raises ModelError if there are too many KV heads."""
    filled = _filled(hf_config)
    heads, groups = size(filled, "num_attention_heads"), IN_WINDOWS * size(filled, "num_key_value_heads")
    if heads % groups:
        raise ModelError(
            f"config.json: num_key_value_heads is {groups // IN_WINDOWS}, so that layers with a window have {groups} KV heads; "
            f"they must divide num_attention_heads={heads}"
        )
    of_windows = rope_of_windows(filled, theta_field=None, theta=THETAS[SLIDING], partial=True)
    return replace(of_windows, heads=LayerHeads(heads, groups, size(filled, "head_dim")))


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Heads of values, and sinks of layers with a window alone."""
    width, scale = size(_filled(hf_config), "v_head_dim"), hf_config.get("attention_value_scale", VALUE_SCALE)
    scale = positive(hf_config, "attention_value_scale", VALUE_SCALE) if scale is not None else 1.0
    return DecoderTraits(values=ValueHeads(width, scale), sinks_in_windows=True)


ARCHITECTURE = text_family(
    "mimo_v2_flash",
    ("MiMoV2FlashForCausalLM", "MiMoV2FlashForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    partial(dense.gpt_kwargs, partial_rotary=True),
    text_config=text_config,
    sglang=SglangFacts(refusal=lambda hf_config: NOT_SERVED),
    hub=HubNames(renamed=((".self_attn.sinks", ".self_attn.attention_sink_bias"),)),
    traits=traits,
    layer_rope=layer_rope,
)
