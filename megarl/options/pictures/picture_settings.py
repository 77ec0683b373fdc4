"""The way in which a run's model takes pictures: its rules and tokens, and the folder that keeps its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.data.media import Expanded, Media
from megarl.options.pictures.picture_keeper import PictureKeeper
from megarl.options.pictures.picture_rules import PictureRules, PictureTokens
from megarl.options.pictures.placeholders import Showable, expand


@dataclass(frozen=True)
class PictureSettings:
    """Facts of a model that takes pictures, and the folder that keeps them; a `ModelMedia` of `data/row_media.py`."""

    rules: PictureRules
    tokens: PictureTokens
    media_folder: Path
    videos: PictureRules | None = None
    """Limits are of all frames together; None: a video's frames are pictures."""

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts that stand for pictures."""
        return self.tokens.reserved

    def keeper(self, image_folder: str | None) -> PictureKeeper:
        """A keeper of the pictures that an episode shows; relative paths are taken in `image_folder`."""
        return PictureKeeper(self.rules, self.media_folder, image_folder)

    def expand(self, ids: Sequence[int], shown: Sequence[Showable]) -> Expanded:
        """`expand` of `placeholders.py` by the model's rules."""
        return expand(ids, shown, self.rules, self.tokens)

    def describe(self, number: int, media: Media) -> str:
        """`picture 1: 448x336 px, patches 1x24x32, 192 tokens from 15 on, /media/9b….png`."""
        (_, high, wide), patch = media.grid, self.rules.patch
        size, grid = f"{wide * patch}x{high * patch} px", "x".join(map(str, media.grid))
        file = media.files(self.media_folder)[0]
        return f"picture {number}: {size}, patches {grid}, {media.tokens} tokens from {media.place} on, {file}"
