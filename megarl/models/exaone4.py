"""Exaone 4: norms behind attention and MLP, norms of heads; where some layers have a window, the others do not rotate."""

from __future__ import annotations

from typing import Any

from megarl.models import dense
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.hf_fields import refuse_biases, size
from megarl.models.rope import Rope
from megarl.models.text_family import text_family
from megarl.models.weight_map import WeightMap
from megarl.models.windows import FULL, sliding_layers, with_windows

DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "max_position_embeddings": 2048}
"""transformers' defaults that differ from those of other families."""
WINDOW, PATTERN = 4096, 4
"""transformers' default window; of so many layers the last attends to all."""
THETA_IN_SGLANG = 1_000_000


def text_config(hf_config: HFConfig, defaults: HFConfig = DEFAULTS) -> HFConfig:
    """The config with what transformers gives fields that are missing: without a window, all layers attend to all.

    Raises:
        ModelError: neither `layer_types` nor a number says which layers have a window.
    """
    if "sliding_window" in hf_config and hf_config["sliding_window"] is None and not hf_config.get("layer_types"):
        hf_config = hf_config | {"layer_types": [FULL] * size(hf_config, "num_hidden_layers")}
    pattern = PATTERN if hf_config.get("layer_types") else size(hf_config, "sliding_window_pattern", PATTERN)
    return with_windows(hf_config, defaults, WINDOW, pattern)


def attention_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with norms of heads and windows. If there is a window, layers without it have no positions.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    sliding = sliding_layers(hf_config) or frozenset()
    no_rope = [int(hf_config["sliding_window"] is not None and layer not in sliding) for layer in range(sizes.num_layers)]
    kwargs = dense.transformer_config_kwargs(hf_config, sizes, sliding) | {"qk_layernorm": True}
    return kwargs | {"no_rope_freq": no_rope} if any(no_rope) else kwargs


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules without norms before attention and MLP, and with those behind them and of heads."""
    attention = dense.attention_rules(sizes, head_norms=True, pre_norm=False)
    after = dense.post_norm_rules(sizes, "post_attention_layernorm", "post_feedforward_layernorm")
    return dense.weight_map(sizes, attention, [*after, *dense.mlp_rules(sizes, pre_norm=False)])


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Norms behind attention and MLP only."""
    return DecoderTraits(pre_norms=False, post_norms=True)


def theta_refusal(hf_config: HFConfig) -> str | None:
    """Why SGLang would rotate by another base than transformers; None: it does not."""
    base = Rope.from_hf(hf_config).base
    return None if base == THETA_IN_SGLANG else f"it rotates by the base {THETA_IN_SGLANG}, whatever rope_theta = {base:g} says"


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    filled, pattern = text_config(hf_config), hf_config.get("sliding_window_pattern")
    layers = range(size(hf_config, "num_hidden_layers"))
    sliding, windowed = sliding_layers(filled) or frozenset(), filled["sliding_window"] is not None
    is_read = isinstance(pattern, str) or not pattern
    of_pattern = frozenset(layer for layer in layers if (layer + 1) % len(pattern)) if is_read and pattern else frozenset()
    if not is_read or bool(pattern) != windowed or of_pattern != sliding:
        return (
            f"it finds windows by the length of sliding_window_pattern = {pattern!r} alone, and not those of layer_types; "
            "it must be a string such as 'LLLG' where layers have windows, and null where none has"
        )
    return theta_refusal(hf_config)


ARCHITECTURE = text_family(
    "exaone4",
    ("Exaone4ForCausalLM", "Exaone4ForSequenceClassification"),
    attention_kwargs,
    weight_map,
    text_config=text_config,
    refusal=_sglang_refusal,
    traits=traits,
)
