"""Qwen3, dense: the dense decoder with an RMSNorm on every q and k head, and heads wider than hidden size over heads."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig
from megarl.models.packings import Copy
from megarl.models.weight_map import Rule, WeightMap

DEFAULT_HEAD_DIM = 128


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    dense.refuse(hf_config, "attention_bias", False, "megatron-core has no bias on q, k, v and o without one on the MLP")
    return dense.transformer_config_kwargs(hf_config, _sizes(hf_config)) | {"qk_layernorm": True}


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    return dense.gpt_kwargs(hf_config, _sizes(hf_config))


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules and the norms of q and k, shared by all heads and whole on every rank."""
    sizes = _sizes(hf_config)
    norms = [
        Rule(
            f"{dense.LAYER}self_attention.{which}_layernorm.weight",
            (f"{dense.HF_LAYER}self_attn.{which}_norm.weight",),
            Copy((sizes.head_dim,)),
        )
        for which in "qk"
    ]
    return dense.weight_map(sizes, norms)


def _sizes(hf_config: HFConfig) -> dense.DenseSizes:
    return dense.DenseSizes.from_hf(hf_config, head_dim=DEFAULT_HEAD_DIM)


ARCHITECTURE = Architecture(
    name="qwen3",
    hf_classes=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
)
