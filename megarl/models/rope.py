"""Rotary embeddings: a Hugging Face config (transformers 4 or 5 spelling) to GPTModel's rotary arguments."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError, nearest

# megatron-core's rope_scaling has these three built in; only the factor is an argument.
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_kwargs(hf_config: dict[str, Any]) -> dict[str, Any]:
    """`position_embedding_type`, `rotary_base`, `rotary_percent` and the scaling arguments of GPTModel.

    Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (4).

    Raises:
        ModelError: the type of scaling, or one of its parameters, has no equivalent in megatron-core.
    """
    field = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    parameters = hf_config.get(field) or {}
    base = float(parameters.get("rope_theta", hf_config.get("rope_theta") or 10000.0))
    partial = parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor is {partial}, but it may only be 1.0")
    return {
        "position_embedding_type": "rope",
        "rotary_base": int(base) if base.is_integer() else base,
        "rotary_percent": 1.0,
        **_scaling(field, parameters),
    }


def _scaling(field: str, parameters: dict[str, Any]) -> dict[str, Any]:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {"rope_scaling": False}
    if kind not in ("linear", "llama3"):
        raise ModelError(
            f"config.json: {field}.rope_type is {kind!r}, but it may be 'default', 'linear' or 'llama3'"
            f"{nearest(str(kind), ('default', 'linear', 'llama3'))}"
        )
    factor = parameters.get("factor")
    if not isinstance(factor, (int, float)) or factor < 1:
        raise ModelError(f"config.json: {field}.factor is {factor!r}, but it must be a number of at least 1")
    if kind == "linear":
        return {"rope_scaling": False, "seq_len_interpolation_factor": float(factor)}
    for name, fixed in LLAMA3_FIXED.items():
        if parameters.get(name) != fixed:
            raise ModelError(
                f"config.json: {field}.{name} is {parameters.get(name)!r}, but it may only be {fixed}, "
                "which megatron-core's llama3 scaling has built in"
            )
    return {"rope_scaling": True, "rope_scaling_factor": float(factor)}
