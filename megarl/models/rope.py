"""Rotary embeddings: the parameters in a Hugging Face config (transformers 4 or 5 spelling), read and checked.

The frequencies are computed in `rope_frequencies.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megarl.errors import ModelError, nearest
from megarl.models.hf_fields import size

KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
_KNOW_THEIR_POSITIONS = ("llama3", "yarn", "longrope")
ORIGINAL = "original_max_position_embeddings"


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
        if kind in _KNOW_THEIR_POSITIONS:  # a field outside counts more, as in transformers
            inside = parameters.get(ORIGINAL, hf_config.get("max_position_embeddings"))
            parameters = {**parameters, ORIGINAL: hf_config.get(ORIGINAL, inside)}
        base = float(parameters.get("rope_theta", hf_config.get("rope_theta") or 10000.0))
        return cls(field, kind, int(base) if base.is_integer() else base, float(partial), parameters)

    def rotated(self, head_dim: int) -> int:
        """Number of a head's dimensions that rotate, as transformers rounds it.

        Raises:
            ModelError: they are no pairs.
        """
        rotated = int(head_dim * self.partial)
        if not rotated or rotated % 2:
            raise ModelError(
                f"config.json: partial_rotary_factor is {self.partial:g}, so that {rotated} of a head's {head_dim} dimensions "
                "rotate; they must be an even number"
            )
        return rotated

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
            rope.number(name, least=least)
            for name, least in (("factor", 1.0), ("low_freq_factor", 0.0), ("high_freq_factor", 0.0))
        )
        if high <= low:
            raise ModelError(
                f"config.json: {rope.field}.high_freq_factor is {high:g}; it must be more than low_freq_factor={low:g}"
            )
        return cls(factor, low, high, rope.number(ORIGINAL, least=1.0))


@dataclass(frozen=True)
class Yarn:
    """Waves that turn less than `slow` times in `positions` are slowed down by `factor`, those that turn more than `fast` times
    kept, those between blended; cosines and sines are multiplied by `scale` (YaRN, arXiv 2309.00071).

    `truncate`: the borders of the blend are whole numbers of dimensions.
    """

    factor: float
    fast: float
    slow: float
    positions: float
    scale: float
    truncate: bool

    @classmethod
    def of(cls, rope: Rope, hf_config: dict[str, Any]) -> Yarn:
        """Read and check the parameters, with transformers' defaults.

        Raises:
            ModelError: one makes no sense.
        """
        positions = rope.number(ORIGINAL, least=1.0)
        factor = rope.number("factor", size(hf_config, "max_position_embeddings") / positions, least=1.0)
        truncate = rope.parameters.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ModelError(f"config.json: {rope.field}.truncate is {truncate!r}; it must be true or false")
        fast, slow = rope.number("beta_fast", 32.0) or 32.0, rope.number("beta_slow", 1.0) or 1.0
        return cls(factor, fast, slow, positions, _yarn_scale(rope, factor), truncate)


def _yarn_scale(rope: Rope, factor: float) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return rope.number("attention_factor", of(above) / of(below) if above and below else of(1.0))


@dataclass(frozen=True)
class LongRope:
    """Each wave of a sequence of at most `positions` is slowed down by its `short` factor; cosines and sines are multiplied by
    `scale` (LongRoPE, arXiv 2402.13753). Longer sequences have factors of their own, which megarl does not compute.
    """

    short: tuple[float, ...]
    positions: float
    scale: float

    @classmethod
    def of(cls, rope: Rope, hf_config: dict[str, Any], rotated: int) -> LongRope:
        """Read and check the parameters; `rotated` of a head's dimensions rotate.

        Raises:
            ModelError: one is missing or makes no sense.
        """
        for name in ("short_factor", "long_factor"):
            factors = rope.parameters.get(name)
            if (
                not isinstance(factors, list)
                or len(factors) != rotated // 2
                or not all(isinstance(n, (int, float)) for n in factors)
            ):
                raise ModelError(
                    f"config.json: {rope.field}.{name} is {factors!r}; it must be {rotated // 2} numbers, one for each pair of "
                    "dimensions that rotates"
                )
        positions = rope.number(ORIGINAL, least=2.0)
        factor = rope.number("factor", size(hf_config, "max_position_embeddings") / positions)
        scale = math.sqrt(1 + math.log(factor) / math.log(positions)) if factor > 1 else 1.0
        return cls(tuple(rope.parameters["short_factor"]), positions, rope.number("attention_factor", scale))


def scaling_of(rope: Rope, hf_config: dict[str, Any], head_dim: int) -> Llama3Scaling | Yarn | LongRope | float:
    """Scaling of the frequencies: by a number alike, or wave by wave.

    Raises:
        ModelError: a parameter is missing or makes no sense.
    """
    if rope.kind == "llama3":
        return Llama3Scaling.of(rope)
    if rope.kind == "yarn":
        return Yarn.of(rope, hf_config)
    if rope.kind == "longrope":
        return LongRope.of(rope, hf_config, rope.rotated(head_dim))
    factor = rope.number("factor", 1.0 if rope.kind == "proportional" else None, least=1.0) if rope.kind != "default" else 1.0
    return (
        factor if rope.kind in ("linear", "proportional") else 1.0
    )  # dynamic NTK leaves sequences within the positions as they are


def rotary_scale(hf_config: dict[str, Any], head_dim: int) -> float:
    """The factor of cosines and sines: transformers' attention factor, 1.0 but for YaRN and LongRoPE.

    Raises:
        ModelError: a parameter is missing or makes no sense.
    """
    scaling = scaling_of(Rope.from_hf(hf_config), hf_config, head_dim)
    return scaling.scale if isinstance(scaling, Yarn | LongRope) else 1.0


def exact_positions(hf_config: dict[str, Any]) -> tuple[int, str] | None:
    """The longest sequence, in tokens, for which the frequencies are the same as for a shorter one, and the field that says so.

    Longer ones of dynamic NTK and LongRoPE have frequencies that depend on the length: a response in the making would change
    those that its prompt was read with. None: length makes no difference.
    """
    rope = Rope.from_hf(hf_config)
    if rope.kind == "dynamic":
        return size(hf_config, "max_position_embeddings"), "max_position_embeddings"
    if rope.kind == "longrope":
        return int(rope.number(ORIGINAL, least=2.0)), ORIGINAL
    return None


def rope_refusal(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang 0.5.23 computes other rotary angles than transformers with this config; None: it does not."""
    rope = Rope.from_hf(hf_config)
    if rope.kind == "dynamic":
        return f"its dynamic NTK changes the frequencies of short sequences, too ({rope.field}.rope_type is 'dynamic')"
    if rope.kind == "proportional":
        return f"it has no such rotary embedding in this family ({rope.field}.rope_type is 'proportional')"
    if rope.kind not in ("yarn", "longrope"):
        return None
    read_otherwise = {
        "yarn": ("attn_factor", "extrapolation_factor"),
        "longrope": ("attention_factor", "factor", "short_mscale", "long_mscale"),
    }[rope.kind]
    if rope.kind == "yarn" and not _says_what_follows(rope, hf_config):
        read_otherwise = ("attention_factor", *read_otherwise)
    for name in read_otherwise:
        if rope.parameters.get(name) is not None:
            return f"it reads {rope.field}.{name} otherwise than transformers, or not at all"
    is_missing = {
        "factor": rope.kind == "yarn" and rope.parameters.get("factor") is None,
        ORIGINAL: hf_config[rope.field].get(ORIGINAL) != rope.parameters[ORIGINAL],
    }
    missing = next((name for name, is_so in is_missing.items() if is_so), None)
    return f"{rope.field}.{missing} must be in config.json, because SGLang reads it there alone" if missing else None


def _says_what_follows(rope: Rope, hf_config: dict[str, Any]) -> bool:
    """Return whether a YaRN's `attention_factor` is the one that its factor gives: SGLang computes it, whatever is said."""
    factor, stated = Yarn.of(rope, hf_config).factor, rope.parameters.get("attention_factor")
    return isinstance(stated, float) and math.isclose(stated, 0.1 * math.log(factor) + 1.0, rel_tol=1e-12)


def refuse_partial(rope: Rope) -> None:
    """Raise ModelError if only a part of a head's dimensions rotates: most families rotate all, whatever the config says."""
    if rope.partial != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor is {rope.partial:g}; it must be 1.0")


def rope_kwargs(hf_config: dict[str, Any], head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """`position_embedding_type`, `rotary_base` and `rotary_percent` of GPTModel; scaling is in `rope_frequencies.py`.

    `partial`: in this family the config says how many of a head's `head_dim` dimensions rotate.

    Raises:
        ModelError: the rotary embedding cannot be represented, or a parameter is missing or makes no sense.
    """
    rope = Rope.from_hf(hf_config)
    if partial:
        rope.rotated(head_dim)
    else:
        refuse_partial(rope)
    scaling_of(rope, hf_config, head_dim)
    return {"position_embedding_type": "rope", "rotary_base": rope.base, "rotary_percent": rope.partial}
