"""Step 3.5 and the text of Step 3.7: gates of heads, windows whose layers have more heads and rotate whole, and experts.

Some layers clamp what MLPs and experts multiply. Norms are stored less one. transformers 5.19 has the layers, as the text of
Step 3.7, and no model of text alone: `step3p5_module.py` is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, GateLimits, HFConfig, SglangFacts
from megarl.models.fused_rows import FusedRows
from megarl.models.hf_fields import positive, refuse, refuse_biases, size, with_defaults
from megarl.models.layer_ropes import LayerHeads, LayerRope, rope_of_windows, with_rope_of_full_layers
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.models.windows import FULL, SLIDING, sliding_layers

DEFAULTS = {
    "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 11264, "vocab_size": 128815, "max_position_embeddings": 128000, "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8, "n_routed_experts": 288, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
}  # fmt: skip
"""transformers' defaults for fields that are missing."""
OTHER_FIELDS = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts", "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}  # fmt: skip
"""Fields of published configs, and what transformers calls them."""
THETA, FIRST_DENSE = 1e4, 3
OF_PUBLISHED: dict[str, Any] = {
    "use_head_wise_attn_gate": True, "gating": True, "use_moe": True, "use_moe_router_bias": True, "norm_expert_weight": True,
    "moe_router_activation": "sigmoid", "zero_centered": True, "use_mfa": False, "sink": False, "use_rope_layers": [],
    "yarn_only_types": [FULL], "tie_word_embeddings": False, "sparse_attention_config": {},
}  # fmt: skip
"""Fields that transformers does not read, or must have so, with the only values that megarl has a model for."""
NOT_SERVED = "megarl has not compared its servers of this family with training; rollout.engine 'embedded' serves it"
MOE, SHARED = "moe.", "share_expert."


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config in transformers' fields, with its defaults; its rotary parameters are those of layers without a window.

    Raises:
        ModelError: rotary parameters are not by kind of layer.
    """
    return with_rope_of_full_layers(_filled(hf_config), full_theta=THETA)


def _filled(hf_config: HFConfig) -> HFConfig:
    named = {OTHER_FIELDS.get(field, field): value for field, value in hf_config.items()}
    filled = with_defaults(named, DEFAULTS)
    layers, behind = size(filled, "num_hidden_layers"), size(filled, "num_nextn_predict_layers", default=0, least=0)
    for field in (
        "layer_types",
        "mlp_layer_types",
        "swiglu_limits",
        "swiglu_limits_shared",
        "rope_theta",
        "partial_rotary_factors",
    ):
        listed = filled.get(field)
        if isinstance(listed, list) and len(listed) == layers + behind:  # with the layers for multi-token prediction
            filled[field] = listed[:layers]
    filled.setdefault("layer_types", [FULL] * layers)
    filled["mlp_layer_types"] = filled.get("mlp_layer_types") or _kinds_of_mlps(filled, layers)
    filled["num_sliding_attention_heads"] = _heads_in_windows(filled)
    return _with_rope_by_kind(filled)


def _kinds_of_mlps(hf_config: HFConfig, layers: int) -> list[str]:
    listed = hf_config.get("moe_layers_enum")
    if listed is None:
        return [moe.MLP_KINDS[int(layer >= FIRST_DENSE)] for layer in range(layers)]
    entries = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(entries, list) or not all(str(entry).strip().isdigit() for entry in entries if str(entry).strip()):
        raise ModelError(f"config.json: moe_layers_enum is {listed!r:.80}; it must be the numbers of the layers with experts")
    chosen = {int(entry) for entry in entries if str(entry).strip()}
    return [moe.MLP_KINDS[int(layer in chosen)] for layer in range(layers)]


def _heads_in_windows(hf_config: HFConfig) -> int:
    """Heads of queries in layers with a window.

    Raises:
        ModelError: fields contradict each other, or say more of these layers than transformers reads.
    """
    other, heads = hf_config.get("attention_other_setting") or {}, size(hf_config, "num_attention_heads")
    for field in ("num_attention_groups", "num_key_value_heads"):
        refuse(other, field, size(hf_config, "num_key_value_heads"), "attention_other_setting has other heads of queries alone")
    refuse(other, "head_dim", size(hf_config, "head_dim"), "attention_other_setting has other heads of queries alone")
    refuse(other, "attention_type", SLIDING, "attention_other_setting is about layers with a window")
    found = size(hf_config, "num_sliding_attention_heads", default=size(other, "num_attention_heads", default=heads))
    for layer, said in (hf_config.get("per_layer_config") or {}).items():
        expected = found if hf_config["layer_types"][int(layer)] == SLIDING else heads
        if said != {"num_attention_heads": expected}:
            raise ModelError(
                f"config.json: per_layer_config says {said!r} of layer {layer}; it must say num_attention_heads={expected}, as "
                "its kind of layers has, and nothing else"
            )
    return found


def _with_rope_by_kind(hf_config: HFConfig) -> HFConfig:
    """The config with rotary parameters by kind of layer, where it has lists of them by layer.

    Raises:
        ModelError: layers of a kind differ, or there is no entry for each layer.
    """
    rest = dict(hf_config)
    listed = {field: rest.pop(field) for field in ("rope_theta", "partial_rotary_factors") if isinstance(rest.get(field), list)}
    if not listed:
        return hf_config
    kinds: list[str] = rest["layer_types"]
    parameters: dict[str, dict[str, Any]] = {kind: {} for kind in dict.fromkeys(kinds)}
    for field, values in listed.items():
        name = {"partial_rotary_factors": "partial_rotary_factor"}.get(field, field)
        for kind, of_kind in parameters.items():
            found = {value for value, of_layer in zip(values, kinds, strict=False) if of_layer == kind}
            if len(values) != len(kinds) or len(found) != 1:
                raise ModelError(f"config.json: {field} must have one entry for each layer, alike in all layers of a kind")
            of_kind[name] = found.pop()
    return {**rest, "rope_parameters": rest.get("rope_parameters") or parameters}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with norms of heads, windows, and experts; what layers with a window have of their own is elsewhere.

    Raises:
        ModelError: biases, attention in both directions, another router, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    refuse(hf_config, "use_bidirectional_attention", False, "attention is causal")
    for field, value in OF_PUBLISHED.items():
        refuse(hf_config, field, value, "so are all published models of this family")
    experts = _experts(hf_config)
    scaling = {"routed_scaling_factor": positive(hf_config, "moe_router_scaling_factor")}
    return (
        dense.transformer_config_kwargs(hf_config, sizes, sliding_layers(hf_config))
        | {"qk_layernorm": True, "layernorm_zero_centered_gamma": True, "hetereogenous_dist_checkpoint": True}
        | {"softmax_scale": positive(hf_config, "query_pre_attn_scalar", sizes.head_dim) ** -0.5}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.sigmoid_router_kwargs(scaling, experts)
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The rules of both kinds of attention, dense layers, and experts with their bias and the shared one.

    Layers for multi-token prediction are carried as they are.
    """
    experts, sliding = _experts(hf_config), sliding_layers(hf_config) or frozenset()
    in_windows = replace(sizes, num_heads=size(hf_config, "num_sliding_attention_heads"))
    attention: list[Rule] = []
    for of_kind, layers in ((sizes, frozenset(range(sizes.num_layers)) - sliding), (in_windows, sliding)):
        gates: dict[str, Any] = {"hf_gate": "g_proj", "gate_rows": 1}
        attention += dense.attention_rules(of_kind, head_norms=True, layers=layers, **gates) if layers else ()
    of_experts = moe.mlp_rules(
        experts, sizes.hidden_size, hf_block=MOE, hf_shared=SHARED, expert_bias=True, hf_expert_bias="router_bias"
    )
    behind = range(sizes.num_layers, sizes.num_layers + size(hf_config, "num_nextn_predict_layers", default=0, least=0))
    left_out = tuple(f"model.layers.{layer}." for layer in behind)
    return moe.weight_map(sizes, experts, attention, _beside_experts(of_experts), left_out=left_out)


def _beside_experts(rules: Iterable[Rule]) -> list[Rule]:
    """The rules with the shared expert beside the block that has the others, as the hub has it."""
    return [replace(rule, hf_names=tuple(name.replace(MOE + SHARED, SHARED) for name in rule.hf_names)) for rule in rules]


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    layers = moe.listed_layers(hf_config, FIRST_DENSE)
    fields: dict[str, Any] = {"experts_fields": ("n_routed_experts",), "ffn_field": "moe_intermediate_size"}
    return replace(moe.MoeSizes.from_hf(hf_config, layers, **fields), shared_ffn_size=size(hf_config, "share_expert_dim"))


def layer_rope(hf_config: HFConfig) -> LayerRope:
    """The layers with a window: their rotation, and their heads."""
    filled = _filled(hf_config)
    heads = LayerHeads(
        size(filled, "num_sliding_attention_heads"), size(filled, "num_key_value_heads"), size(filled, "head_dim")
    )
    return replace(rope_of_windows(filled, theta_field=None, theta=THETA, partial=True), heads=heads)


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Gates of heads, and limits of what MLPs and experts multiply. Raises ModelError where these are not by layer."""
    filled = _filled(hf_config)
    layers = size(filled, "num_hidden_layers")
    shared, experts = (_limits(filled, field, layers) for field in ("swiglu_limits_shared", "swiglu_limits"))
    limits = tuple(map(GateLimits, shared, experts))
    return DecoderTraits(head_gates=True, gate_limits=limits if min(*shared, *experts) < math.inf else ())


def _limits(hf_config: HFConfig, field: str, layers: int) -> list[float]:
    listed = hf_config.get(field) or [0.0] * layers
    is_number = [entry is None or (isinstance(entry, (int, float)) and entry >= 0) for entry in listed]
    if len(listed) != layers or not all(is_number):
        raise ModelError(
            f"config.json: {field} is {listed!r:.80}; it must have a number of at least 0, or null, for each layer"
        )
    return [float(entry or math.inf) for entry in listed]


def stored_together(hf_config: HFConfig) -> FusedRows:
    """The experts of a layer, whose matrices are one behind another, for each of their three projections."""
    filled = text_config(hf_config)
    experts, hidden = _experts(filled), size(filled, "hidden_size")
    rows = {"gate_proj": experts.expert_ffn_size, "up_proj": experts.expert_ffn_size, "down_proj": hidden}
    columns = {"gate_proj": hidden, "up_proj": hidden, "down_proj": experts.expert_ffn_size}
    numbers = range(experts.num_experts)
    parts = {f"{MOE}{name}.weight": tuple((f"{MOE}experts.{n}.{name}.weight", rows[name]) for n in numbers) for name in rows}
    stacks = {f"{MOE}{name}.weight": (experts.num_experts, columns[name]) for name in rows}
    return FusedRows(parts, hidden, stacks=stacks)


def hub_name(name: str) -> str:
    """The hub's name of a tensor of transformers' module, whose experts are still together."""
    name = name.replace(".mlp.shared_experts.", f".{SHARED}").replace(".mlp.gate.e_score_correction_bias", f".{MOE}router_bias")
    return name.replace(".mlp.gate.", f".{MOE}gate.").replace(".mlp.experts.", f".{MOE}experts.")


ARCHITECTURE = text_family(
    "step3p5",
    ("Step3p5ForCausalLM", "Step3p5ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    partial(dense.gpt_kwargs, partial_rotary=True),
    text_config=text_config,
    sglang=SglangFacts(refusal=lambda hf_config: NOT_SERVED),
    hub_name=hub_name,
    traits=traits,
    layer_rope=layer_rope,
    fused_experts=stored_together,
    module="megarl.models.step3p5_module",
)
