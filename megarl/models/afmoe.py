"""AFMoE (Trinity): gated attention that rotates in layers with a window alone, four norms, experts behind dense layers.

The gate is a projection of its own; embeddings may be multiplied by the root of the hidden size.
"""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.hf_fields import refuse, size
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap
from megarl.models.windows import sliding_layers, with_windows

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_shared_experts": 2,
    "route_scale": 1.0,
}
"""transformers' defaults that differ from those of other families."""
WINDOW, PATTERN = 1024, 4
"""transformers' default window; of so many layers the last attends to all."""
BEFORE_MLP = "pre_mlp_layernorm"
_REASON = "transformers scores experts by sigmoids, which it normalises, without groups"


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return with_windows(hf_config, DEFAULTS, WINDOW, size(hf_config, "global_attn_every_n_layers", default=PATTERN))


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with gates, `qk_layernorm` and windows, in whose layers alone it rotates, and experts.

    Raises:
        ModelError: biases, another router, or anything that the dense decoder refuses.
    """
    refuse(hf_config, "attention_bias", False, "the gate has no bias where q, k, v and o have one")
    for field, value in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        refuse(hf_config, field, value, _REASON)
    experts, sliding = experts_of(hf_config), sliding_layers(hf_config) or frozenset()
    return (
        dense.transformer_config_kwargs(hf_config, sizes, sliding)
        | {"qk_layernorm": True, "attention_output_gate": True}
        | {"no_rope_freq": [int(layer not in sliding) for layer in range(sizes.num_layers)]}
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.sigmoid_router_kwargs({"routed_scaling_factor": hf_config["route_scale"]}, experts)
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules with gates, norms of heads and behind both branches, dense first layers, and experts with their bias."""
    experts = experts_of(hf_config)
    attention = dense.attention_rules(sizes, head_norms=True, hf_gate="gate_proj")
    after = dense.post_norm_rules(sizes, "post_attention_layernorm", "post_mlp_layernorm")
    names = {"hf_norm": BEFORE_MLP, "hf_router": "router.gate", "hf_expert_bias": "expert_bias"}
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, expert_bias=True, **names)  # type: ignore[arg-type]
    return moe.weight_map(sizes, experts, attention, [*after, *of_experts], hf_norm=BEFORE_MLP)


def experts_of(hf_config: HFConfig) -> moe.MoeSizes:
    """Experts in all layers but the first `num_dense_layers`. Raises ModelError as `MoeSizes.from_hf`."""
    first = size(hf_config, "num_dense_layers", least=0)
    return moe.MoeSizes.from_hf(
        hf_config,
        range(first, size(hf_config, "num_hidden_layers")),
        experts_fields=("num_experts", "num_local_experts"),
        ffn_field="moe_intermediate_size",
        shared_experts=size(hf_config, "num_shared_experts"),
    )


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Norms behind attention and MLP, and the multiplier of embeddings."""
    multiplier = size(hf_config, "hidden_size") ** 0.5 if hf_config.get("mup_enabled") else 1.0
    return DecoderTraits(post_norms=True, embedding_multiplier=multiplier)


ARCHITECTURE = text_family(
    "afmoe",
    ("AfmoeForCausalLM", "AfmoeForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    refusal=lambda hf_config: "it packs experts otherwise than in other families, and updates would not reach them",
    traits=traits,
)
