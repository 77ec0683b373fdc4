"""Qwen3, dense: the dense decoder with an RMSNorm on every q and k head, and heads wider than hidden size over heads."""

from __future__ import annotations

from functools import partial
from typing import Any

from megarl.models import dense
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import refuse_biases
from megarl.models.prediction_layer import behind_the_decoder
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap
from megarl.models.windows import DEFAULT_WINDOW, qwen_sliding_layers


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    sliding = qwen_sliding_layers(hf_config)
    return dense.transformer_config_kwargs(hf_config, sizes, sliding, DEFAULT_WINDOW) | {"qk_layernorm": True}


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules and the norms of q and k, shared by all heads and whole on every rank."""
    attention, mlp = dense.attention_rules(sizes, head_norms=True), dense.mlp_rules(sizes)
    more = {} if qwen_sliding_layers(hf_config) else behind_the_decoder(hf_config, sizes, [*attention, *mlp])
    return dense.weight_map(sizes, attention, mlp, **more)


ARCHITECTURE = text_family(
    "qwen3",
    ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    sizes_of=partial(dense.DenseSizes.from_hf, head_dim=128),
    sglang=SglangFacts(replicates_attention=True),
    serves_windows=False,
)
