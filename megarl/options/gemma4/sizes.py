"""Properties of the layers of a Gemma 4 model, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OPTION = "gemma4"


@dataclass(frozen=True)
class OwnKind:
    """A layer's own: the layer whose keys and values it takes (None: it has some), and whether another layer takes its own.

    `keys_are_values`: values are keys as they were projected. `wide`: its MLP is twice as wide as others.
    """

    takes: int | None
    is_taken: bool
    keys_are_values: bool
    wide: bool


@dataclass(frozen=True)
class Gemma4Layers:
    """All layers, counted from 0. Each has an input of its own of width `inputs` for every token (0: none has).

    `mixture`: each has experts beside its MLP.
    """

    kinds: tuple[OwnKind, ...]
    inputs: int
    vocabulary: int
    mixture: bool
    option: str = OPTION

    @property
    def keyless(self) -> frozenset[int]:
        """The layers that take another's keys and values."""
        return frozenset(layer for layer, kind in enumerate(self.kinds) if kind.takes is not None)

    @property
    def followed(self) -> Mapping[int, int]:
        """By layer, the earlier one that must be in the same model chunk; of inputs only a first chunk knows tokens enough."""
        if self.inputs:
            return dict.fromkeys(range(1, len(self.kinds)), 0)
        return {layer: kind.takes for layer, kind in enumerate(self.kinds) if kind.takes is not None}
