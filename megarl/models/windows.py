"""Sliding windows: in which layers a token attends to the last tokens alone, and how many these are, by a Hugging Face config.

A window of W tokens is a token itself and the W - 1 before it, as transformers counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megarl.errors import LayoutError, ModelError
from megarl.models.hf_fields import size, with_defaults

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = (FULL, SLIDING)
DEFAULT_WINDOW = 4096
"""transformers' for Mistral and Qwen, whose configs may leave it out."""
DEFAULT_MAX_WINDOW_LAYERS = 28
"""transformers' number of Qwen's first layers that attend to everything, where a config does not say."""


def window_kwargs(hf_config: dict[str, Any], sliding: Collection[int], default: int | None = None) -> dict[str, Any]:
    """TransformerConfig's arguments where the layers `sliding` (zero-based) have windows; none if no window hides anything.

    `default` is the family's window where the config leaves it out. megatron-core counts the tokens before a token.

    Raises:
        ModelError: the window is no positive integer, or missing.
    """
    layers = size(hf_config, "num_hidden_layers")
    if not sliding or ("sliding_window" in hf_config and hf_config["sliding_window"] is None):
        return {}
    window = size(hf_config, "sliding_window", default)
    if window >= size(hf_config, "max_position_embeddings"):
        return {}
    of_layers = [int(layer in sliding) for layer in range(layers)]
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": None if all(of_layers) else of_layers}


def sliding_layers(hf_config: dict[str, Any]) -> frozenset[int] | None:
    """The layers that `layer_types` says have a window; None: the config does not say.

    Raises:
        ModelError: it does not say one of `KINDS` for each layer, or says that there are windows without their length.
    """
    kinds, layers = hf_config.get("layer_types"), size(hf_config, "num_hidden_layers")
    if kinds is None:
        return None
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or len(kinds) != layers:
        fault = repr(unknown[0]) if unknown else f"{len(kinds)} layers"
        raise ModelError(
            f"config.json: layer_types has {fault}; it must say {FULL!r} or {SLIDING!r} for each of the {layers} layers"
        )
    if SLIDING in kinds and hf_config.get("sliding_window") is None:
        raise ModelError(f"config.json: layer_types has {SLIDING!r}, but sliding_window is {hf_config.get('sliding_window')!r}")
    return frozenset(n for n, kind in enumerate(kinds) if kind == SLIDING)


def with_windows(hf_config: dict[str, Any], defaults: Mapping[str, Any], window: int, pattern: int) -> dict[str, Any]:
    """The config with `defaults` for what is missing or null, with its `window`, and with kinds for all layers.

    Of each `pattern` layers the last attends to all, where the config does not say. A window that is null stays so.
    """
    filled = with_defaults(hf_config, defaults)
    filled["sliding_window"] = hf_config.get("sliding_window", window)
    if not filled.get("layer_types"):
        layers = range(1, size(filled, "num_hidden_layers") + 1)
        filled["layer_types"] = [SLIDING if layer % pattern else FULL for layer in layers]
    return filled


def in_all_layers(hf_config: dict[str, Any], *, sliding: bool) -> frozenset[int]:
    """All layers or none, in families that take no notice of `layer_types`.

    Raises:
        ModelError: `layer_types` says otherwise.
    """
    layers = frozenset(range(size(hf_config, "num_hidden_layers"))) if sliding else frozenset()
    if (listed := sliding_layers(hf_config)) is not None and listed != layers:
        every = SLIDING if sliding else FULL
        raise ModelError(
            f"config.json: layer_types names other layers than {every!r}, which is what all layers of this family are"
        )
    return layers


def qwen_sliding_layers(hf_config: dict[str, Any]) -> frozenset[int]:
    """Qwen2's and Qwen3's: with `use_sliding_window` those of `layer_types`, or those from `max_window_layers` on.

    Raises:
        ModelError: a field makes no sense, or `layer_types` names windows that `use_sliding_window` turns off.
    """
    if not hf_config.get("use_sliding_window"):
        return in_all_layers(hf_config, sliding=False)
    if (listed := sliding_layers(hf_config)) is not None:
        return listed
    first = size(hf_config, "max_window_layers", default=DEFAULT_MAX_WINDOW_LAYERS, least=0)
    return frozenset(range(first, size(hf_config, "num_hidden_layers")))


def window_refusal(kwargs: dict[str, Any]) -> str | None:
    """Why SGLang 0.5.23 cannot serve a model with these arguments of TransformerConfig, where it ignores a family's windows."""
    if "window_size" not in kwargs:
        return None
    return f"it attends to all tokens in this family, but sliding_window is {kwargs['window_size'][0] + 1}"


def check_windows(layer_spec: str, *, windows: bool) -> None:
    """Raise LayoutError where the layers of `layer_spec` cannot compute the windows of a model.

    megarl packs sequences: megatron-core's local attention would let a window reach into the sequence before. Transformer
    Engine's under context parallelism is in `context_exchange.py`.
    """
    if layer_spec == "local" and windows:
        raise LayoutError(
            "model.layer_spec is 'local', but this model has sliding windows, which megatron-core's local layers cannot "
            "compute on packed sequences; it must be 'reference' or 'transformer_engine'"
        )
