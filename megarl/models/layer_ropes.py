"""Rotary embeddings of families whose layers with a window rotate by other frequencies than those that attend to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense
from megarl.models.rope import Rope, refuse_partial, rope_kwargs
from megarl.models.windows import FULL, SLIDING, sliding_layers

KINDS_OF_FULL = ("default", "linear", "yarn")


@dataclass(frozen=True)
class LayerHeads:
    """So many heads of queries, and of keys, of width `head_dim`."""

    num_heads: int
    num_groups: int
    head_dim: int


@dataclass(frozen=True)
class LayerRope:
    """The rotation of the `layers` (zero-based) that do not rotate as the decoder's config says: as `config` says.

    `heads` are those of these layers' attention; None: as many and as wide as in the others.
    """

    layers: frozenset[int]
    config: dict[str, Any]
    heads: LayerHeads | None = None


def with_rope_of_full_layers(hf_config: dict[str, Any], *, full_theta: float) -> dict[str, Any]:
    """A config whose rotary parameters are those of the layers that attend to all, as other families have them.

    transformers 5 has parameters by kind of layer in `rope_parameters`. Before, `rope_theta` (`full_theta` where it is left
    out) and `rope_scaling` were of the layers that attend to all alone.

    Raises:
        ModelError: `rope_parameters` is not by kind of layer.
    """
    parameters = dict(_of_kind(hf_config, FULL)) | (hf_config.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", hf_config.get("rope_theta") or full_theta)
    rest = {name: value for name, value in hf_config.items() if name not in ("rope_scaling", "rope_theta")}
    return rest | {"rope_parameters": parameters}


def rope_of_windows(hf_config: dict[str, Any], *, theta_field: str | None, theta: float, partial: bool = False) -> LayerRope:
    """The rotation of the layers with a window: unscaled, by a base that `theta_field` had before transformers 5, or `theta`.

    `partial`: the config may say how many of a head's dimensions rotate.

    Raises:
        ModelError: `rope_parameters` is not by kind of layer, or their frequencies are scaled.
    """
    parameters = dict(_of_kind(hf_config, SLIDING))
    parameters.setdefault("rope_theta", (hf_config.get(theta_field) if theta_field else None) or theta)
    window_config = {**hf_config, "rope_parameters": parameters}
    for field in ("rope_scaling", "rope_theta"):
        window_config.pop(field, None)
    Rope.from_hf(window_config, kinds=("default",))
    rope_kwargs(window_config, dense.DenseSizes.from_hf(hf_config).head_dim, partial=partial)
    return LayerRope(sliding_layers(hf_config) or frozenset(), window_config)


def gpt_kwargs_of_full_layers(hf_config: dict[str, Any], sizes: dense.DenseSizes) -> dict[str, Any]:
    """Vocabulary, positions and tying of a config by `with_rope_of_full_layers`.

    Raises:
        ModelError: the frequencies are scaled as families here cannot.
    """
    refuse_partial(Rope.from_hf(hf_config, kinds=KINDS_OF_FULL))
    return dense.gpt_kwargs(hf_config, sizes)


def _of_kind(hf_config: dict[str, Any], kind: str) -> dict[str, Any]:
    parameters = hf_config.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or not set(parameters) <= {FULL, SLIDING}:
        raise ModelError(
            f"config.json: rope_parameters is {parameters!r}; it must have {FULL!r} and {SLIDING!r}, each with "
            "parameters of its own"
        )
    return parameters.get(kind) or {}
