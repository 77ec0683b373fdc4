"""Rotary embeddings: the parameters in a Hugging Face config (transformers 4 or 5 spelling), read and checked.

The frequencies are computed in `rope_frequencies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.errors import ModelError, nearest

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """The rotary parameters of a config. `field` is where they are, `base` that of the frequencies, `kind` the scaling.

    `partial` is the share of a head's dimensions that rotates: the first ones.
    """

    field: str
    kind: str
    base: float
    partial: float
    parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], kinds: tuple[str, ...] = KINDS) -> Rope:
        """Read `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (4).

        Raises:
            ModelError: the kind of scaling is none of `kinds`, or the share of a head's dimensions that rotates is no share.
        """
        field = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
        parameters = hf_config.get(field) or {}
        partial = parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
        partial = 1.0 if partial is None else partial
        if not isinstance(partial, (int, float)) or not 0 < partial <= 1:
            raise ModelError(f"config.json: partial_rotary_factor is {partial!r}; it must be more than 0 and at most 1")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in kinds:
            listed = " or ".join(filter(None, [", ".join(repr(k) for k in kinds[:-1]), repr(kinds[-1])]))
            raise ModelError(f"config.json: {field}.rope_type is {kind!r}; it must be {listed}{nearest(str(kind), kinds)}")
        base = float(parameters.get("rope_theta", hf_config.get("rope_theta") or 10000.0))
        return cls(field, kind, int(base) if base.is_integer() else base, float(partial), parameters)

    def rotated(self, head_dim: int) -> int:
        """How many of a head's dimensions rotate, as transformers rounds it.

        Raises:
            ModelError: they are no pairs.
        """
        found = int(head_dim * self.partial)
        if not found or found % 2:
            raise ModelError(
                f"config.json: partial_rotary_factor is {self.partial:g}, so that {found} of a head's {head_dim} dimensions "
                "rotate; they must be an even number"
            )
        return found

    def number(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        """A parameter that must be a number of at least `least`; `default` where it is absent or null.

        Raises:
            ModelError: it is not.
        """
        value = self.parameters.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < least:
            raise ModelError(f"config.json: {self.field}.{name} is {value!r}; it must be a number of at least {least:g}")
        return float(value)


@dataclass(frozen=True)
class Llama3Scaling:
    """Long waves are slowed down by `factor`, short ones kept, those between blended (Llama 3.1)."""

    factor: float
    low: float
    high: float
    positions: float

    @classmethod
    def of(cls, rope: Rope) -> Llama3Scaling:
        """Read and check the four parameters.

        Raises:
            ModelError: one is missing or makes no sense.
        """
        factor, low, high = (
            rope.number("factor", least=1.0),
            rope.number("low_freq_factor", least=0.0),
            rope.number("high_freq_factor", least=0.0),
        )
        if high <= low:
            raise ModelError(
                f"config.json: {rope.field}.high_freq_factor is {high:g}; it must be more than low_freq_factor={low:g}"
            )
        return cls(factor, low, high, rope.number("original_max_position_embeddings", least=1.0))


def refuse_partial(rope: Rope) -> None:
    """Raise ModelError if only a part of a head's dimensions rotates: most families rotate all, whatever the config says."""
    if rope.partial != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor is {rope.partial:g}; it must be 1.0")


def rope_kwargs(hf_config: dict[str, Any], rotated_of: int | None = None) -> dict[str, Any]:
    """`position_embedding_type`, `rotary_base` and `rotary_percent` of GPTModel; scaling is in `rope_frequencies.py`.

    `rotated_of` are a head's dimensions in a family where the config says how many of them rotate; None: all do.

    Raises:
        ModelError: the rotary embedding cannot be represented, or a parameter is missing or makes no sense.
    """
    rope = Rope.from_hf(hf_config)
    if rotated_of is None:
        refuse_partial(rope)
    else:
        rope.rotated(rotated_of)
    if rope.kind == "linear":
        rope.number("factor", least=1.0)
    elif rope.kind == "llama3":
        Llama3Scaling.of(rope)
    return {"position_embedding_type": "rope", "rotary_base": rope.base, "rotary_percent": rope.partial}
