"""Placeholders of pictures among ids: a tokenizer gives one for each picture, a model takes one for each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.options.pictures.images import KeptPicture
from megarl.options.pictures.media import Media, PictureRules
from megarl.options.pictures.picture_rules import PictureTokens


@dataclass(frozen=True)
class FramePair:
    """Two frames of a native video, which are one grid of patches in time."""

    first: KeptPicture
    second: KeptPicture


Showable = KeptPicture | FramePair


@dataclass(frozen=True)
class Expanded:
    """Ids in which each picture has a placeholder for each of its tokens, and the pictures with their places.

    `counts` says how many of them each id became: 1 but for placeholders.
    """

    ids: list[int]
    media: list[Media]
    counts: list[int]


def expand(ids: Sequence[int], shown: Sequence[Showable], rules: PictureRules, tokens: PictureTokens) -> Expanded:
    """`ids`, which hold one placeholder for each of `shown`, in their order.

    Raises:
        ValueError: they hold more placeholders, or less, or one of a video where a picture is.
    """
    found = [token == tokens.video_id for token in ids if token in (tokens.image_id, tokens.video_id)]
    if found != [isinstance(one, FramePair) for one in shown]:
        raise ValueError(f"there are {len(found)} placeholders for {len(shown)} pictures")
    expanded: list[int] = []
    media: list[Media] = []
    counts: list[int] = []
    for token in ids:
        count = 1
        if token in (tokens.image_id, tokens.video_id):
            one = shown[len(media)]
            frames = (one.first, one.second) if isinstance(one, FramePair) else (one,)
            grid = (1, frames[0].height // rules.patch, frames[0].width // rules.patch)
            count = grid[1] * grid[2] // rules.merge**2
            digests = tuple(frame.digest for frame in frames)
            media.append(Media("video" if isinstance(one, FramePair) else "image", digests, grid, len(expanded), count))
        counts.append(count)
        expanded += [token] * count
    return Expanded(expanded, media, counts)
