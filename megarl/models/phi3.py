"""Phi-4 and Phi-3: Llama's decoder, stored with q, k, v in one tensor and gate, up in another; a share of a head rotates."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.fused_rows import FusedRows, gate_over_up, queries_keys_values
from megarl.models.hf_fields import with_defaults
from megarl.models.rope import Rope, rope_refusal
from megarl.models.weight_map import WeightMap
from megarl.models.windows import in_all_layers, window_refusal

DEFAULTS = {"rms_norm_eps": 1e-5}
"""transformers' default that differs from that of other families."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    return with_defaults(hf_config, DEFAULTS)


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder without biases, with windows in all layers where the config says how long they are.

    Raises:
        ModelError: anything that the dense decoder refuses.
    """
    hf_config = text_config(hf_config)
    sliding = in_all_layers(hf_config, sliding="sliding_window" in hf_config)
    return dense.transformer_config_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config), sliding)


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying.

    Raises:
        ModelError: the rotary embedding is scaled otherwise than in the models for long contexts (`longrope`).
    """
    Rope.from_hf(hf_config, kinds=("default", "longrope"))
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config), partial_rotary=True)


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules."""
    sizes = dense.DenseSizes.from_hf(hf_config)
    return dense.weight_map(sizes, dense.attention_rules(sizes), dense.mlp_rules(sizes))


def fused_rows(hf_config: HFConfig) -> FusedRows:
    """Queries, keys and values are one tensor, gate and up another."""
    sizes = dense.DenseSizes.from_hf(hf_config)
    projections = queries_keys_values(sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.head_dim)
    return FusedRows(projections | gate_over_up(sizes.ffn_size), sizes.hidden_size)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    share = Rope.from_hf(hf_config).partial
    if share != float(hf_config.get("partial_rotary_factor") or 1.0):
        return (
            f"its config.json must say partial_rotary_factor = {share:g} beside rope_parameters, where SGLang does not read it"
        )
    return window_refusal(transformer_config_kwargs(hf_config)) or rope_refusal(hf_config)


ARCHITECTURE = Architecture(
    name="phi3",
    hf_classes=("Phi3ForCausalLM", "Phi3ForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(refusal=_sglang_refusal),
    text_config=text_config,
    fused_rows=fused_rows,
)
