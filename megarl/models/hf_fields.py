"""Reading fields of a Hugging Face `config.json`, with a sentence for what is missing, wrong or cannot be represented."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError


def size(hf_config: dict[str, Any], field: str, default: int | None = None, *, least: int = 1) -> int:
    """An integer field of at least `least`, `default` where it is absent or null.

    Raises:
        ModelError: it is absent without a default, or no such integer.
    """
    value = hf_config.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ModelError(f"config.json: {field} is {value!r}; it must be {kind}")
    return value


def refuse(hf_config: dict[str, Any], field: str, supported: Any, why: str) -> None:
    """Raise ModelError unless a field is absent, null or `supported`."""
    value = hf_config.get(field)
    if value is not None and value != supported:
        raise ModelError(f"config.json: {field} is {value!r}; it must be {supported!r}: {why}")


def without_prediction_layers(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config of a folder that has no layers for multi-token prediction: they are neither trained nor exported.

    A model that sees has the field among those of its decoder.
    """
    fields = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    found = hf_config | {field: 0 for field in fields if hf_config.get(field)}
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = without_prediction_layers(found["text_config"])
    return found


def refuse_biases(hf_config: dict[str, Any]) -> None:
    """Raise ModelError if all of q, k, v and o have biases, or the MLP has."""
    refuse(hf_config, "attention_bias", False, "megatron-core has no bias on q, k, v and o without one on the MLP")
    refuse(hf_config, "mlp_bias", False, "megatron-core has no bias on the MLP without one on the attention")


def refuse_quantised(hf_config: dict[str, Any]) -> None:
    """Raise ModelError if the weights are quantised."""
    quantisation = hf_config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise ModelError(
            f"config.json: quantization_config is of method {method!r}, but training needs weights that are not quantised; "
            "use the model's bfloat16 release, or convert the folder"
        )


def refuse_sliding_window(hf_config: dict[str, Any], sliding_layers: int) -> None:
    """Raise ModelError if `sliding_layers` is not 0 and `sliding_window` is shorter than the positions the model has."""
    if any(kind != "full_attention" for kind in hf_config.get("layer_types") or ()):
        raise ModelError("config.json: layer_types names other layers than 'full_attention', which is all that is supported")
    window, positions = hf_config.get("sliding_window"), size(hf_config, "max_position_embeddings")
    if sliding_layers > 0 and window is not None and window < positions:
        raise ModelError(
            f"config.json: sliding_window is {window} in {sliding_layers} layers, but only full attention is supported; "
            f"it must be null, or at least max_position_embeddings={positions}"
        )


def qwen_sliding_layers(hf_config: dict[str, Any]) -> int:
    """How many layers attend through `sliding_window`: with `use_sliding_window` those from `max_window_layers` on."""
    if not hf_config.get("use_sliding_window") or hf_config.get("layer_types"):
        return 0
    return size(hf_config, "num_hidden_layers") - size(hf_config, "max_window_layers", default=0, least=0)
