"""The vision tower of a model that sees, as the rest of megarl knows it: sizes, names and shapes. Without torch.

These describe a published model. Families that have a tower, the tower itself and all that is done with pictures are the option
pictures (`vision_part`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import ModuleType

from megarl.config.presets import ModelPart
from megarl.errors import ModelError
from megarl.option_list import part

TOWER = "visual."
"""Beginning of the names of the tower's parameters in the model that is trained, and in its checkpoints."""
PROJECTOR = tuple(f"{TOWER}{name}." for name in ("merger", "deepstack_merger_list", "downsample", "proj1", "proj2"))
"""Beginnings of the names of those of its parameters that make tokens' features of patches' ones."""


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
        axes = [0] * sum(self.sections)
        for axis in (1, 2):
            places = range(axis, 3 * self.sections[axis], 3)
            if places and places[-1] >= len(axes):
                raise ModelError(
                    f"config.json: mrope_section is {list(self.sections)}; interleaved it must begin with the largest"
                )
            for pair in places:
                axes[pair] = axis
        return axes


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
    a LayerNorm, and a gated MLP of this width. Where the tower's class has none, `projector` is its own class in the same
    file, which is made of the whole config: it is the tower's `merger`, behind the last layer's norm, a norm of its own and two
    linear layers. `mrope` None: the decoder's tokens have one position. `qkv` is what the hub calls the one matrix of queries,
    keys and values of a layer whose module has three, with pairs of dimensions that rotate together side by side: the tower
    has it so. `section` is the tower's part of the config.

    A tower that hears is described alike: a patch is a token's worth of a sound, and sounds are rows of patches.
    """

    tower: str
    shapes: Mapping[str, tuple[int, ...]]
    mrope: Mrope | None
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
    projector: str | None = None
    qkv: str | None = None
    section: str = "vision_config"

    @property
    def parameters(self) -> int:
        """Number that the tower has, projectors included."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def products(self) -> tuple[int, int]:
        """Multiply-adds of its matrices for each patch, and for each token: those of the projectors."""
        products = {False: 0, True: 0}
        for name, shape in self.shapes.items():
            if len(shape) > 1 and name != self.position_table:
                products[(TOWER + name).startswith(PROJECTOR)] += prod(shape)
        return products[False], products[True]

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of a patch as the tower takes it: in a row, or the square that its embedding is over."""
        embedding = self.shapes["patch_embed.proj.weight"]
        return embedding[1:] if len(embedding) == 4 else (self.patch_width,)


def vision_part(place: str) -> ModuleType:
    """The file of this name in the option pictures, for models that have a tower."""
    return part("pictures", place, "a model that sees")
