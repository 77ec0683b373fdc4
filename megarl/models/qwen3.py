"""Qwen3, dense: the dense decoder with an RMSNorm on every q and k head, and heads wider than hidden size over heads."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse_biases
from megarl.models.prediction_layer import behind_the_decoder
from megarl.models.rope import rope_refusal
from megarl.models.weight_map import WeightMap
from megarl.models.windows import DEFAULT_WINDOW, qwen_sliding_layers, window_refusal

DEFAULT_HEAD_DIM = 128


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    kwargs = dense.transformer_config_kwargs(hf_config, _sizes(hf_config), qwen_sliding_layers(hf_config), DEFAULT_WINDOW)
    return kwargs | {"qk_layernorm": True}


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    return dense.gpt_kwargs(hf_config, _sizes(hf_config))


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules and the norms of q and k, shared by all heads and whole on every rank."""
    sizes = _sizes(hf_config)
    attention, mlp = dense.attention_rules(sizes, head_norms=True), dense.mlp_rules(sizes)
    more = {} if qwen_sliding_layers(hf_config) else behind_the_decoder(hf_config, sizes, [*attention, *mlp])
    return dense.weight_map(sizes, attention, mlp, **more)


def _sizes(hf_config: HFConfig) -> dense.DenseSizes:
    """The config's sizes."""
    return dense.DenseSizes.from_hf(hf_config, head_dim=DEFAULT_HEAD_DIM)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    return window_refusal(transformer_config_kwargs(hf_config)) or rope_refusal(hf_config)


ARCHITECTURE = Architecture(
    name="qwen3",
    hf_classes=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(replicates_attention=True, refusal=_sglang_refusal),
)
