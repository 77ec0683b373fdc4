"""Gemma 4's text: windows in most layers, whose heads are smaller, norms of queries, keys and values, scores not scaled.

Small sizes have an input of every layer for each token, and last layers that take keys and values of earlier ones, with MLPs
twice as wide; large ones have values that are keys in layers without a window, and one a mixture beside every MLP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig, SglangFacts
from megarl.models.dense import HF_LAYER, LAYER
from megarl.models.fused_experts import FusedExperts
from megarl.models.hf_fields import positive, refuse, size
from megarl.models.layer_ropes import LayerHeads, LayerRope, rope_of_windows, with_rope_of_full_layers
from megarl.models.packings import Copy, Vocabulary
from megarl.models.rope import Rope
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.models.windows import FULL, SLIDING, sliding_layers, with_windows
from megarl.options.gemma4.sizes import Gemma4Layers, OwnKind

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "vocab_size_per_layer_input": 262_144, "num_kv_shared_layers": 0,
}  # fmt: skip
"""transformers' defaults for fields that are missing or null."""
WINDOW, PATTERN, INPUTS, GLOBAL_HEAD = 512, 6, 256, 512
FULL_THETA, WINDOW_THETA = 1e6, 1e4
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": FULL_THETA}
BEFORE_MLP = "pre_feedforward_layernorm"
NOT_SERVED = "megarl has not compared its servers of this family with training; rollout.engine 'embedded' serves it"


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with transformers' defaults; head size, KV heads and rotary parameters are those of layers without a window.

    Raises:
        ModelError: fields of these layers contradict each other.
    """
    filled = _filled(hf_config)
    head_dim, groups = _full_heads(filled)
    return with_rope_of_full_layers(filled, full_theta=FULL_THETA) | {
        "head_dim": head_dim,
        "num_key_value_heads": groups,
        "window_heads": _window_heads(filled),
    }


def _filled(hf_config: HFConfig) -> HFConfig:
    filled = with_windows(hf_config, DEFAULTS, WINDOW, PATTERN)
    filled["hidden_size_per_layer_input"] = hf_config.get("hidden_size_per_layer_input", INPUTS) or 0
    filled["layer_types"] = [*filled["layer_types"][:-1], FULL]  # as transformers does
    filled.setdefault("rope_parameters", {FULL: FULL_ROPE, SLIDING: {"rope_type": "default", "rope_theta": WINDOW_THETA}})
    filled.pop("hidden_act", None)  # of which transformers takes no notice here
    return filled


def _full_heads(hf_config: HFConfig) -> tuple[int, int]:
    """Size of a head, and KV heads, of layers without a window.

    Raises:
        ModelError: `per_layer_config`, in which transformers 5 saves them, is of other layers, or says something else.
    """
    groups, saved = size(hf_config, "num_key_value_heads"), hf_config.get("per_layer_config")
    if saved is None:
        of_full = size(hf_config, "num_global_key_value_heads", default=groups) if hf_config.get("attention_k_eq_v") else groups
        return size(hf_config, "global_head_dim", default=GLOBAL_HEAD), of_full
    full = {layer for layer, kind in enumerate(hf_config["layer_types"]) if kind == FULL}
    entries = list(saved.values())
    if (
        {int(layer) if str(layer).isdigit() else layer for layer in saved} != full
        or entries != entries[:1] * len(full)
        or not {*entries[0]} <= {"head_dim", "num_key_value_heads"}
    ):
        raise ModelError(
            f"config.json: per_layer_config is {saved!r:.80}; it must say the same head_dim, and num_key_value_heads if they "
            "differ, of each layer without a window, and nothing else"
        )
    found = {"num_key_value_heads": groups, "head_dim": hf_config["head_dim"]} | entries[0]
    return size(found, "head_dim"), size(found, "num_key_value_heads")


def _window_heads(hf_config: HFConfig) -> LayerHeads:
    fields = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return LayerHeads(*(size(hf_config, field) for field in fields))


def layers_of(hf_config: HFConfig) -> Gemma4Layers:
    """Properties of each layer, by a config with its defaults.

    Raises:
        ModelError: all layers take keys of others, or one of a kind that no layer before has.
    """
    kinds, shared = hf_config["layer_types"], size(hf_config, "num_kv_shared_layers", least=0)
    first = len(kinds) - shared
    if first < 1:
        raise ModelError(f"config.json: num_kv_shared_layers is {shared}; it must be less than num_hidden_layers={len(kinds)}")
    if missing := {*kinds[first:]} - {*kinds[:first]}:
        raise ModelError(
            f"config.json: num_kv_shared_layers is {shared}, but no layer before these is of kind {min(missing)!r}, whose keys "
            "and values theirs would be"
        )
    sources = {kind: max(layer for layer in range(first) if kinds[layer] == kind) for kind in {*kinds[first:]}}
    return Gemma4Layers(
        kinds=tuple(
            OwnKind(
                takes=sources[kind] if layer >= first else None,
                is_taken=layer in sources.values(),
                keys_are_values=kind == FULL and bool(hf_config.get("attention_k_eq_v")),
                wide=layer >= first and bool(hf_config.get("use_double_wide_mlp")),
            )
            for layer, kind in enumerate(kinds)
        ),
        inputs=size(hf_config, "hidden_size_per_layer_input", least=0),
        vocabulary=size(hf_config, "vocab_size_per_layer_input"),
        mixture=bool(hf_config.get("enable_moe_block")),
    )


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`, scores as they are, windows, and a gate of GELU's approximation by tanh.

    Raises:
        ModelError: biases, attention in both directions, another gate, a vocabulary of its own for inputs of layers, wide MLPs
            beside a mixture, or anything that the dense decoder refuses.
    """
    refuse(hf_config, "attention_bias", False, "megatron-core has no bias on q, k, v and o without one on the MLP")
    refuse(hf_config, "hidden_activation", "gelu_pytorch_tanh", "the MLP is built with this gate")
    refuse(hf_config, "use_bidirectional_attention", "vision", "text attends causally")
    layers, experts = layers_of(hf_config), _experts(hf_config)
    if layers.inputs:
        refuse(
            hf_config, "vocab_size_per_layer_input", sizes.vocab_size, "tokens have inputs of layers as they have embeddings"
        )
    if experts is not None and any(kind.wide for kind in layers.kinds):
        raise ModelError("config.json: use_double_wide_mlp and enable_moe_block are both true; one of them must be false")
    kwargs = dense.transformer_config_kwargs(hf_config, sizes, sliding_layers(hf_config))
    kwargs |= {"qk_layernorm": True, "softmax_scale": 1.0, "activation": "gelu_tanh", "hetereogenous_dist_checkpoint": True}
    if experts is not None:
        kwargs |= moe.transformer_config_kwargs(experts, sizes.num_layers) | moe.softmax_router_kwargs(experts, normalised=True)
    return kwargs


def _experts(hf_config: HFConfig) -> moe.MoeSizes | None:
    """The experts of every layer, with the MLP beside them as the one that all tokens share; None: there are none."""
    if not hf_config.get("enable_moe_block"):
        return None
    named = {**hf_config, "num_experts_per_tok": hf_config.get("top_k_experts")}
    fields: dict[str, Any] = {"experts_fields": ("num_experts",), "ffn_field": "moe_intermediate_size"}
    found = moe.MoeSizes.from_hf(named, range(size(hf_config, "num_hidden_layers")), **fields)
    return replace(found, shared_ffn_size=size(hf_config, "intermediate_size"))


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The rules of every kind of layer, and of the layers' inputs. Keys of layers that take others' are carried as they are."""
    layers, experts = layers_of(hf_config), _experts(hf_config)
    rules = [
        *_attention_rules(hf_config, sizes, layers),
        *dense.post_norm_rules(sizes, "post_attention_layernorm", "post_feedforward_layernorm"),
    ]
    rules.append(Rule(LAYER + "layer_scalar", (HF_LAYER + "layer_scalar",), Copy((1,)), constant=True))
    rules += _input_rules(sizes, layers) if layers.inputs else ()
    takers = [layer for layer, kind in enumerate(layers.kinds) if kind.takes is not None]
    left_out = tuple(
        f"model.layers.{layer}.self_attn.{name}." for layer in takers for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    mlps = _mlp_rules(sizes, layers) if experts is None else _mixture_rules(sizes, experts)
    number = 0 if experts is None else experts.num_experts
    return dense.weight_map(sizes, rules, mlps, num_experts=number, left_out=left_out)


def _attention_rules(hf_config: HFConfig, sizes: dense.DenseSizes, layers: Gemma4Layers) -> list[Rule]:
    heads: LayerHeads = hf_config["window_heads"]
    in_windows = replace(sizes, num_groups=heads.num_groups, head_dim=heads.head_dim)
    rules: list[Rule] = []
    for kind, of_kind in ((FULL, sizes), (SLIDING, in_windows)):
        here = [layer for layer, found in enumerate(hf_config["layer_types"]) if found == kind]
        own = frozenset(layer for layer in here if layers.kinds[layer].takes is None)
        takers = frozenset(here) - own
        as_values = any(layers.kinds[layer].keys_are_values for layer in own)
        rules += dense.attention_rules(of_kind, head_norms=True, keys_as_values=as_values, layers=own) if own else ()
        rules += _taking_rules(of_kind, takers) if takers else ()
    return rules


def _taking_rules(sizes: dense.DenseSizes, layers: frozenset[int]) -> list[Rule]:
    """Attention without keys and values of its own."""
    whole = dense.attention_rules(sizes, head_norms=True, layers=layers)
    queries = Copy((sizes.num_heads * sizes.head_dim, sizes.hidden_size), axis=0)
    kept = [rule for rule in whole if not rule.megatron_name.endswith("k_layernorm.weight")]
    return [
        replace(rule, hf_names=rule.hf_names[:1], packing=queries) if rule.megatron_name.endswith("linear_qkv.weight") else rule
        for rule in kept
    ]


def _mlp_rules(sizes: dense.DenseSizes, layers: Gemma4Layers) -> list[Rule]:
    wide = frozenset(layer for layer, kind in enumerate(layers.kinds) if kind.wide)
    others = frozenset(range(sizes.num_layers)) - wide
    rules = dense.mlp_rules(sizes, others, hf_norm=BEFORE_MLP) if others else []
    of_wide = replace(sizes, ffn_size=2 * sizes.ffn_size)
    return [*rules, *(dense.mlp_rules(of_wide, wide, hf_norm=BEFORE_MLP) if wide else ())]


def _mixture_rules(sizes: dense.DenseSizes, experts: moe.MoeSizes) -> list[Rule]:
    """The MLP as a shared expert, with norms of its own before and behind, and the experts with theirs."""
    block, norm, vector = LAYER + "mlp.", "post_feedforward_layernorm", Copy((sizes.hidden_size,))
    names = {LAYER + "pre_mlp_layernorm.": block + "shared_experts.pre_norm.", block: block + "shared_experts."}
    routed = moe.mlp_rules(replace(experts, shared_ffn_size=0), sizes.hidden_size, hf_block="", hf_router="router.proj")
    vectors = {
        "shared_experts.post_norm.weight": f"{norm}_1.weight",
        "fc1_latent_proj.weight": f"{BEFORE_MLP}_2.weight",
        "fc2_latent_proj.weight": f"{norm}_2.weight",
        "router.scale": "router.scale",
    }
    return [
        *_renamed(dense.mlp_rules(sizes, hf_norm=BEFORE_MLP), names),
        *(rule for rule in routed if not rule.megatron_name.endswith("pre_mlp_layernorm.weight")),
        *(Rule(block + name, (HF_LAYER + hf_name,), vector) for name, hf_name in vectors.items()),
        Rule(block + "router.expert_scale", (HF_LAYER + "router.per_expert_scale",), Copy((experts.num_experts,))),
    ]


def _renamed(rules: Iterable[Rule], names: dict[str, str]) -> list[Rule]:
    def renamed(name: str) -> str:
        return next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old))

    return [replace(rule, megatron_name=renamed(rule.megatron_name), te_name=None) for rule in rules]


def _input_rules(sizes: dense.DenseSizes, layers: Gemma4Layers) -> list[Rule]:
    """The table of all layers' inputs, their projection of the embedding, and what a layer makes of its own."""
    width, hidden = layers.inputs, sizes.hidden_size
    of_all, of_model = sizes.num_layers * width, "embedding.layer_inputs."
    return [
        Rule(
            of_model + "table.weight", ("model.embed_tokens_per_layer.weight",), Vocabulary(layers.vocabulary, of_all), "first"
        ),
        Rule(of_model + "projection.weight", ("model.per_layer_model_projection.weight",), Copy((of_all, hidden)), "first"),
        Rule(of_model + "norm.weight", ("model.per_layer_projection_norm.weight",), Copy((width,)), "first"),
        Rule(LAYER + "input_gate.weight", (HF_LAYER + "per_layer_input_gate.weight",), Copy((width, hidden))),
        Rule(LAYER + "input_projection.weight", (HF_LAYER + "per_layer_projection.weight",), Copy((hidden, width))),
        Rule(LAYER + "post_input_layernorm.weight", (HF_LAYER + "post_per_layer_input_norm.weight",), Copy((hidden,))),
    ]


def layer_rope(hf_config: HFConfig) -> LayerRope:
    """The layers with a window: their rotation, and their heads."""
    filled = _filled(hf_config)
    return replace(rope_of_windows(filled, theta_field=None, theta=WINDOW_THETA), heads=_window_heads(filled))


def gpt_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Vocabulary, positions and tying. Raises ModelError if layers without a window rotate otherwise than transformers has."""
    Rope.from_hf(hf_config, kinds=("proportional", "default"))
    return dense.gpt_kwargs(hf_config, sizes, partial_rotary=True)


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Norms behind attention and MLP, the multiplier of embeddings, the cap of logits, and the layers' own."""
    filled = _filled(hf_config)
    capped = filled.get("final_logit_softcapping") is not None
    return DecoderTraits(
        post_norms=True,
        embedding_multiplier=size(filled, "hidden_size") ** 0.5,
        rounded_multiplier=True,
        logits_cap=positive(filled, "final_logit_softcapping") if capped else None,
        own_layers=layers_of(filled),
    )


def fused_experts(hf_config: HFConfig) -> FusedExperts | None:
    """The sizes of the experts that the hub stores together, as transformers has them; None: there are none."""
    experts = _experts(filled := text_config(hf_config))
    if experts is None:
        return None
    return FusedExperts(experts.num_experts, size(filled, "hidden_size"), experts.expert_ffn_size, transposed=False)


ARCHITECTURE = text_family(
    "gemma4_text",
    ("Gemma4ForCausalLM", "Gemma4TextForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    gpt_kwargs,
    text_config=text_config,
    sglang=SglangFacts(refusal=lambda hf_config: NOT_SERVED),
    traits=traits,
    layer_rope=layer_rope,
    fused_experts=fused_experts,
    followed=lambda hf_config: layers_of(_filled(hf_config)).followed,
)
