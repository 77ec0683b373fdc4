"""Pictures in prompts and between turns: what travels in their place.

A picture is decoded and resized once, and kept as a PNG of its final size under a hash of its pixels. Everything else says
which one it is, how many patches it has and where it is among the tokens; only who needs the pixels reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

Pixels = tuple[tuple[str, ...], tuple[int, int, int]]
"""Identity of a picture's pixels: digests of its files and its grid."""


@dataclass(frozen=True)
class Media:
    """One picture, or the frames of one video, of a prompt or of what was told in a response.

    `grid` is its patches in time, height and width, `place` the number of its first placeholder among the ids, of
    which it has `tokens`, one after another: where a model has text between a video's frames, a pair of frames is a video.
    Every frame of a video has a digest, in their order; a picture has one. `seconds_per_grid` is the time from one grid of a
    video to the next.
    """

    kind: Literal["image", "video"]
    digests: tuple[str, ...]
    grid: tuple[int, int, int]
    place: int
    tokens: int
    seconds_per_grid: float | None = None

    @property
    def pixels(self) -> Pixels:
        """Equal for pictures that look the same to a model."""
        return self.digests, self.grid

    def moved(self, tokens: int) -> Media:
        """The same where `tokens` more ids come before it."""
        return replace(self, place=self.place + tokens)

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> Media:
        """Read what `dataclasses.asdict` and JSON made of one."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
        return cls(**values)

    def files(self, folder: Path) -> list[Path]:
        """The paths of its pictures in a run's media folder."""
        return [folder / f"{digest}.png" for digest in self.digests]


@dataclass(frozen=True)
class PictureRules:
    """The rules of a model for its pictures: sizes in pixels, and what its colours are normalised by.

    A patch is a square of `patch` pixels in `temporal` frames, and `merge` by `merge` patches are one token. A picture is
    resized to multiples of `patch * merge`, with `min_pixels` to `max_pixels` in all. With `grows_first` one that has a side
    shorter than that is first enlarged until the side has this length (GLM).
    """

    patch: int
    temporal: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    grows_first: bool = False
