"""Qwen3.5's text models, dense: gated delta nets, gated attention in every fourth layer.

Text has the same position on the three axes of its rotary embedding, which is then a plain one. A folder may have a layer
for multi-token prediction, with full attention (option `prediction`).
"""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.prediction_layer import beside_the_decoder
from megarl.models.weight_map import WeightMap
from megarl.options.linear_attention import delta_net
from megarl.options.linear_attention.delta_net import text_config


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Linear and gated attention before a dense MLP.

    Raises:
        ModelError: biases, layers of another kind, or anything that the dense decoder refuses.
    """
    hf_config = text_config(hf_config)
    sizes = dense.DenseSizes.from_hf(hf_config)
    return delta_net.transformer_config_kwargs(hf_config, sizes, delta_net.DeltaSizes.from_hf(hf_config))


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    hf_config = text_config(hf_config)
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config), partial_rotary=True)


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The rules of both kinds of attention and the dense MLP."""
    hf_config = text_config(hf_config)
    sizes, delta = dense.DenseSizes.from_hf(hf_config), delta_net.DeltaSizes.from_hf(hf_config)
    projection = delta_net.separate_projections(sizes.hidden_size, delta)
    attention, mlp = delta_net.attention_rules(sizes, delta, projection), dense.mlp_rules(sizes)
    more = beside_the_decoder(hf_config, sizes, [*delta_net.gated_attention_rules(sizes), *mlp])
    return dense.weight_map(sizes, attention, mlp, **more)


ARCHITECTURE = Architecture(
    name="qwen3_5_text",
    hf_classes=("Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(),
    text_config=text_config,
    linear=delta_net.linear_attention,
)
