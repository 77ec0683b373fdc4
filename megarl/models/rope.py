"""Rotary embeddings: a Hugging Face config (transformers 4 or 5 spelling) to frequencies, as transformers computes them.

megatron-core's own scaling of Llama 3 has three of its parameters built in, so the model's rotary embedding is given the
frequencies computed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.errors import ModelError, nearest

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """The rotary parameters of a config. `field` is where they are, `base` that of the frequencies, `kind` the scaling."""

    field: str
    kind: str
    base: float
    parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], kinds: tuple[str, ...] = KINDS) -> Rope:
        """Read `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (4).

        Raises:
            ModelError: the kind of scaling is none of `kinds`, or only a part of a head's dimensions rotates.
        """
        field = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
        parameters = hf_config.get(field) or {}
        partial = parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor")) or 1.0
        if partial != 1.0:
            raise ModelError(f"config.json: partial_rotary_factor is {partial}, but it may only be 1.0")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in kinds:
            listed = " or ".join([", ".join(repr(k) for k in kinds[:-1]), repr(kinds[-1])])
            raise ModelError(f"config.json: {field}.rope_type is {kind!r}, but it may be {listed}{nearest(str(kind), kinds)}")
        base = float(parameters.get("rope_theta", hf_config.get("rope_theta") or 10000.0))
        return cls(field, kind, int(base) if base.is_integer() else base, parameters)

    def number(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        """A parameter that must be a number of at least `least`; `default` where it is absent or null.

        Raises:
            ModelError: it is not.
        """
        value = self.parameters.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < least:
            raise ModelError(f"config.json: {self.field}.{name} is {value!r}, but it must be a number of at least {least:g}")
        return float(value)


def rope_kwargs(hf_config: dict[str, Any]) -> dict[str, Any]:
    """`position_embedding_type`, `rotary_base` and `rotary_percent` of GPTModel; scaling is in `inverse_frequencies`.

    Raises:
        ModelError: the rotary embedding cannot be represented, or a parameter is missing or makes no sense.
    """
    inverse_frequencies(hf_config, head_dim=2)  # to refuse a wrong parameter here, before any process starts
    return {"position_embedding_type": "rope", "rotary_base": Rope.from_hf(hf_config).base, "rotary_percent": 1.0}


def inverse_frequencies(hf_config: dict[str, Any], head_dim: int) -> Tensor:
    """The angle per position of each pair of a head's dimensions, float32 `[head_dim / 2]`.

    Raises:
        ModelError: the rotary embedding cannot be represented, or a parameter is missing or makes no sense.
    """
    rope = Rope.from_hf(hf_config)
    frequencies = 1.0 / (rope.base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.number("factor", least=1.0)
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves are slowed down by the factor, short ones kept, those between blended (Llama 3.1)."""
    factor, low, high = (
        rope.number("factor", least=1.0),
        rope.number("low_freq_factor", least=0.0),
        rope.number("high_freq_factor", least=0.0),
    )
    if high <= low:
        raise ModelError(
            f"config.json: {rope.field}.high_freq_factor is {high:g}, but it must be more than low_freq_factor={low:g}"
        )
    positions = rope.number("original_max_position_embeddings", least=1.0)
    wavelengths = 2 * math.pi / frequencies
    share_kept = ((positions / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / factor + share_kept * frequencies
