"""Gemma 2: Gemma 3 without norms of heads, with capped attention scores and logits, and windows in every other layer."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.gemma3_text import gemma_kwargs, gemma_weight_map
from megarl.models.hf_fields import positive, size
from megarl.models.rope import Rope
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap
from megarl.models.windows import sliding_layers, with_windows

DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
"""transformers' defaults, which published configs leave out."""
WINDOW, PATTERN = 4096, 2
"""transformers' default window; of so many layers the last attends to all."""
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""transformers' default caps of attention scores and of logits; null means that there is none."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    filled = with_windows(hf_config, DEFAULTS, WINDOW, PATTERN) | {name: hf_config.get(name, cap) for name, cap in CAPS.items()}
    filled.pop("hidden_act", None)  # of which transformers takes no notice here
    return filled


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with a scale of attention scores, windows, and a gate of GELU's approximation by tanh.

    Raises:
        ModelError: biases, attention in both directions, another gate, a cap that is no positive number, or anything that the
            dense decoder refuses.
    """
    traits(hf_config)
    return gemma_kwargs(hf_config, sizes)


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules and two further norms in every layer."""
    return gemma_weight_map(sizes)


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Norms behind attention and MLP, caps, and the multiplier of embeddings, which transformers has in the model's dtype.

    Raises:
        ModelError: a cap is no positive number.
    """
    filled = text_config(hf_config)
    caps = [None if filled[name] is None else positive(filled, name) for name in CAPS]
    return DecoderTraits(
        post_norms=True,
        embedding_multiplier=size(filled, "hidden_size") ** 0.5,
        rounded_multiplier=True,
        score_cap=caps[0],
        logits_cap=caps[1],
    )


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    filled = text_config(hf_config)
    if not filled["tie_word_embeddings"]:
        return "its output layer is the embedding, whatever tie_word_embeddings = false says"
    if (kind := Rope.from_hf(filled).kind) != "default":
        return f"it has no rotary embedding of type {kind!r} in this family"
    if sliding_layers(filled) != frozenset(range(0, filled["num_hidden_layers"], PATTERN)):
        return "it gives every other layer a window, from the first one on, whatever layer_types say"
    return None


ARCHITECTURE = text_family(
    "gemma2",
    ("Gemma2ForCausalLM", "Gemma2ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    refusal=_sglang_refusal,
    traits=traits,
)
