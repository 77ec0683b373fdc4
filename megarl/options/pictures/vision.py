"""Additions of a family that sees to one that reads: a tower that makes features of patches, and positions of three axes.

The decoder is a text family's, told by the text part of `config.json`. The tower is transformers' own module, whole on every
tensor rank of the first pipeline stage (`options/pictures/tower.py`); here are its sizes and the names and shapes of its
weights. The
configs of transformers 4 and 5 differ in where they have the decoder's fields: both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from megarl.config.presets import ModelPart
from megarl.errors import ModelError
from megarl.models.hf_fields import refuse, size, with_defaults

TOWER = "visual."
"""Beginning of the names of the tower's parameters in the model that is trained, and in its checkpoints."""
PROJECTOR = (f"{TOWER}merger.", f"{TOWER}deepstack_merger_list.", f"{TOWER}downsample.")
"""Beginnings of the names of those of its parameters that make tokens' features of patches' ones."""

Shapes = dict[str, tuple[int, ...]]
"""Tensors by the name that they have in the tower."""


def part_of(parameter: str) -> ModelPart:
    """The part of a model that a parameter belongs to, by its name; text models have one part, `language`."""
    if parameter.startswith(PROJECTOR):
        return "projector"
    return "vision" if parameter.startswith(TOWER) else "language"


@dataclass(frozen=True)
class Mrope:
    """Rotary angles by three positions (time, height, width): `sections` pairs of a head's dimensions go by each of them.

    They lie in one block for each axis, or `interleaved`: time, height, width, time, ..., and time where an axis has no more.
    """

    sections: tuple[int, int, int]
    interleaved: bool = False

    def axes(self) -> list[int]:
        """The axis (0, 1 or 2) that each pair of a head's dimensions goes by."""
        if not self.interleaved:
            return [axis for axis, pairs in enumerate(self.sections) for _ in range(pairs)]
        found = [0] * sum(self.sections)
        for axis in (1, 2):
            places = range(axis, 3 * self.sections[axis], 3)
            if places and places[-1] >= len(found):
                raise ModelError(
                    f"config.json: mrope_section is {list(self.sections)}; interleaved it must begin with the largest"
                )
            for place in places:
                found[place] = axis
        return found


@dataclass(frozen=True)
class Vision:
    """The tower of a config.

    `tower` is its class in `transformers.models.<model_type>.modeling_<model_type>`, `shapes` are its tensors. A patch is a
    square of `patch` pixels in `temporal` frames of `channels` colours; `merge` by `merge` patches are one token, whose
    features have `out` numbers. `hidden` and `depth` are width and number of its layers, which have `heads` and feed-forward
    layers of width `ffn` with an `activation`; `deepstack` are those whose features are added behind the decoder's first
    ones. `tokens_per_second` says how far time goes on in a second of a video; None: one position from grid to grid.
    `image_token` and `video_token` are the placeholders. In `window_layers` of its layers a patch attends to those of a
    square of `window` by `window` patches, in the others to all of its frames. `position_table` is the tensor
    that positions are looked up in, if there is one: no product is computed with it, and `position_bytes` are what the
    backward pass needs of each patch's place in it. `embedding_norms` follow the embedding of patches. A projector
    is a norm and two linear layers; with a `projector_ffn` it is a convolution behind the last layer's norm, a linear layer,
    a LayerNorm, and a gated MLP of this width.
    """

    tower: str
    shapes: Mapping[str, tuple[int, ...]]
    mrope: Mrope
    patch: int
    temporal: int
    merge: int
    channels: int
    hidden: int
    out: int
    depth: int
    heads: int
    ffn: int
    activation: str
    deepstack: tuple[int, ...]
    tokens_per_second: float | None
    position_table: str | None
    image_token: int
    video_token: int
    window: int = 0
    window_layers: int = 0
    position_bytes: int = 0
    embedding_norms: int = 0
    projector_ffn: int = 0

    @property
    def parameters(self) -> int:
        """Number that the tower has, projectors included."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def products(self) -> tuple[int, int]:
        """Multiply-adds of its matrices for each patch, and for each token: those of the projectors."""
        found = {False: 0, True: 0}
        for name, shape in self.shapes.items():
            if len(shape) > 1 and name != self.position_table:
                found[(TOWER + name).startswith(PROJECTOR)] += prod(shape)
        return found[False], found[True]

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.temporal * self.patch**2


@dataclass(frozen=True)
class TextConfig:
    """The part of a family's config with the decoder's fields: beside `vision_config` (transformers 4), or in
    `text_config` (5).

    `defaults` are those of transformers that differ from a text family's. `tied_in_text`: embeddings are also tied where only
    the text's config says so, as transformers before 5 wrote it.
    """

    defaults: Mapping[str, Any]
    tied_in_text: bool

    def __call__(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """The config that a text family reads.

        Raises:
            ModelError: `text_config` is no object.
        """
        nested = _object(hf_config, "text_config", hf_config)
        tied = bool(hf_config.get("tie_word_embeddings")) or (self.tied_in_text and bool(nested.get("tie_word_embeddings")))
        kept: dict[str, Any] = {
            name: hf_config[name] for name in ("architectures", "id2label", "quantization_config") if name in hf_config
        }
        given = {name: value for name, value in nested.items() if value is not None and name != "vision_config"}
        found: dict[str, Any] = {**self.defaults, **given, **kept, "tie_word_embeddings": tied}
        for field in ("rope_parameters", "rope_scaling"):
            if isinstance(found.get(field), Mapping):
                found[field] = _without_axes(found[field])
        return found


def mrope_of(hf_config: dict[str, Any], *, default: tuple[int, int, int], interleaved: bool, head_dim: int) -> Mrope:
    """What a config says of its rotary angles; `head_dim` is how many of the dimensions of a decoder's head rotate.

    Raises:
        ModelError: the sections are not those of half of these dimensions, or lie otherwise than the family's.
    """
    text = _object(hf_config, "text_config", hf_config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = tuple(rope.get("mrope_section") or default)
    if len(sections) != 3 or any(not isinstance(n, int) or n < 0 for n in sections) or sum(sections) * 2 != head_dim:
        raise ModelError(
            f"config.json: mrope_section is {list(sections)}; it must be three numbers that add up to half of "
            f"a head's {head_dim} dimensions that rotate"
        )
    refuse(rope, "mrope_interleaved", interleaved, "transformers computes no other angles for this family")
    found = Mrope((sections[0], sections[1], sections[2]), interleaved)
    found.axes()
    return found


def vision_config(hf_config: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`vision_config` with transformers' defaults for what it lacks.

    Raises:
        ModelError: it is no object, or patches are not squares.
    """
    given = _object(hf_config, "vision_config", {})
    found = with_defaults(given, defaults)
    if "in_chans" in given:  # the hub's name; transformers reads in_channels alone
        refuse(given, "in_chans", found["in_channels"], "transformers reads in_channels alone")
    return found


def placeholders(hf_config: dict[str, Any], image: int = 151655, video: int = 151656) -> dict[str, int]:
    """The ids that stand in a prompt for an image's and a video's features, with the family's own as defaults."""
    return {
        "image_token": size(hf_config, "image_token_id", default=image, least=0),
        "video_token": size(hf_config, "video_token_id", default=video, least=0),
    }


def linear(name: str, out: int, into: int, *, bias: bool = True) -> Shapes:
    """A linear layer."""
    return {f"{name}.weight": (out, into), **({f"{name}.bias": (out,)} if bias else {})}


def layer_norm(name: str, width: int) -> Shapes:
    """A LayerNorm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def blocks(depth: int, of_block: Callable[[str], Shapes]) -> Shapes:
    """The tensors of `depth` equal layers; `of_block` takes what a layer's names begin with."""
    return {name: shape for number in range(depth) for name, shape in of_block(f"blocks.{number}.").items()}


def _object(hf_config: dict[str, Any], field: str, default: dict[str, Any]) -> dict[str, Any]:
    value = hf_config.get(field)
    if value is None:
        return default
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {field} is {value!r}; it must be an object")
    return dict(value)


def _without_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters as a text model has them: what transformers 4 calls `mrope` are the default frequencies."""
    found = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    return {name: "default" if name in ("type", "rope_type") and value == "mrope" else value for name, value in found.items()}
