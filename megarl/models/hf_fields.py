"""Reading fields of a Hugging Face `config.json`, with a sentence for what is missing, wrong or cannot be represented."""

from __future__ import annotations

from collections.abc import Mapping
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


def size_of_all_layers(hf_config: dict[str, Any], field: str, default: int | None = None) -> int:
    """A positive integer field that may also be a list of one for each layer, all alike; `default` as in `size`.

    Raises:
        ModelError: layers differ, or it is no such integer.
    """
    value = hf_config.get(field)
    if isinstance(value, list) and value:
        if any(of_layer != value[0] for of_layer in value):
            raise ModelError(f"config.json: {field} is {value!r:.80}; it must be the same for all layers")
        value = value[0]
    return size(hf_config | {field: value}, field, default)


def positive(hf_config: dict[str, Any], field: str, default: float | None = None) -> float:
    """A field that must be a number above 0, `default` where it is absent. Raises ModelError if it is not."""
    value = hf_config.get(field, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {field} is {value!r}; it must be a number above 0")
    return float(value)


def with_defaults(hf_config: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null, and `defaults` of those that are missing or null."""
    return {**defaults, **{name: value for name, value in hf_config.items() if value is not None}}


def refuse(hf_config: dict[str, Any], field: str, supported: Any, why: str) -> None:
    """Raise ModelError unless a field is absent, null or `supported`."""
    value = hf_config.get(field)
    if value is not None and value != supported:
        raise ModelError(f"config.json: {field} is {value!r}; it must be {supported!r}: {why}")


def without_prediction_layers(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config of a folder that has no layers for multi-token prediction.

    A model that sees has the field among those of its decoder.
    """
    fields = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    config = hf_config | {field: 0 for field in fields if hf_config.get(field)}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = without_prediction_layers(config["text_config"])
    return config


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


def without_mxfp4(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model with MXFP4 experts as they are after dequantisation."""
    quantisation = hf_config.get("quantization_config")
    if not isinstance(quantisation, dict) or quantisation.get("quant_method") != "mxfp4":
        return hf_config
    return {name: value for name, value in hf_config.items() if name != "quantization_config"}


def without_tied_output(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model with an output layer of its own in place of the embedding."""
    changed = dict(hf_config) | {"tie_word_embeddings": False}
    for part, value in hf_config.items():
        if isinstance(value, dict) and value.get("tie_word_embeddings"):
            changed[part] = value | {"tie_word_embeddings": False}
    return changed
