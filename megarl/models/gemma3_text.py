"""Gemma 3 text: norms before and behind attention and MLP, windows in five of six layers, which rotate faster than the others.

Weights of norms are stored less one, embeddings are multiplied by the root of the hidden size, the MLP's gate is a GELU.
"""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import dense
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.hf_fields import positive, refuse, size
from megarl.models.layer_ropes import LayerRope, gpt_kwargs_of_full_layers, rope_of_windows, with_rope_of_full_layers
from megarl.models.rope import Rope
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap
from megarl.models.windows import sliding_layers, with_windows

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
"""transformers' defaults, which published configs leave out."""
WINDOW, PATTERN = 4096, 6
"""transformers' default window; of so many layers the last attends to all."""
FULL_THETA, WINDOW_THETA = 1e6, 1e4


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing, and the rotary parameters of layers without a window."""
    return with_rope_of_full_layers(_filled(hf_config), full_theta=FULL_THETA)


def _filled(hf_config: HFConfig) -> HFConfig:
    pattern = PATTERN if hf_config.get("layer_types") else size(hf_config, "sliding_window_pattern", PATTERN)
    filled = with_windows(hf_config, DEFAULTS, WINDOW, pattern)
    filled.pop("hidden_act", None)  # of which transformers takes no notice here
    return filled


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm`, a scale of attention scores, windows, and a gate of GELU's approximation by tanh.

    Raises:
        ModelError: biases, capped logits, attention in both directions, another gate, or anything that the dense decoder
            refuses.
    """
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hf_config.get(field) is not None:
            raise ModelError(f"config.json: {field} is {hf_config[field]!r}; it must be null: logits are not capped")
    return gemma_kwargs(hf_config, sizes) | {"qk_layernorm": True}


def gemma_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The common part of Gemma 2 and 3.

    Raises:
        ModelError: biases, attention in both directions, another gate, or anything that the dense decoder refuses.
    """
    refuse(hf_config, "attention_bias", False, "megatron-core has no bias on q, k, v and o without one on the MLP")
    refuse(hf_config, "hidden_activation", "gelu_pytorch_tanh", "the MLP is built with this gate")
    refuse(hf_config, "use_bidirectional_attention", False, "attention is causal")
    scale = positive(hf_config, "query_pre_attn_scalar") ** -0.5
    return dense.transformer_config_kwargs(hf_config, sizes, sliding_layers(hf_config)) | {
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": scale,
        "activation": "gelu_tanh",
    }


def layer_rope(hf_config: HFConfig) -> LayerRope:
    """The layers with a window, however long it is. Raises ModelError if their rotary embedding is scaled."""
    return rope_of_windows(_filled(hf_config), theta_field="rope_local_base_freq", theta=WINDOW_THETA)


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules with norms of heads, and two further norms in every layer."""
    return gemma_weight_map(sizes, head_norms=True, embedding_whole_in_engines=True)


def gemma_weight_map(sizes: dense.DenseSizes, *, head_norms: bool = False, **more: Any) -> WeightMap:
    """The common rules, and two further norms in every layer; `more` are `dense.weight_map`'s."""
    attention = dense.attention_rules(sizes, head_norms=head_norms)
    after = dense.post_norm_rules(sizes, "post_attention_layernorm", "post_feedforward_layernorm")
    mlp = dense.mlp_rules(sizes, hf_norm="pre_feedforward_layernorm")
    return dense.weight_map(sizes, attention, [*after, *mlp], **more)


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Norms behind attention and MLP, and the multiplier of embeddings, which transformers has in the model's dtype."""
    hidden = size(text_config(hf_config), "hidden_size")
    return DecoderTraits(post_norms=True, embedding_multiplier=hidden**0.5, rounded_multiplier=True)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    hf_config = text_config(hf_config)
    if not hf_config["tie_word_embeddings"]:
        return "its output layer is the embedding, whatever tie_word_embeddings = false says"
    kind = Rope.from_hf(hf_config).kind
    return None if kind in ("default", "linear") else f"it has no rotary embedding of type {kind!r} in this family"


ARCHITECTURE = text_family(
    "gemma3_text",
    ("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    gpt_kwargs_of_full_layers,
    text_config=text_config,
    refusal=_sglang_refusal,
    traits=traits,
    layer_rope=layer_rope,
)
