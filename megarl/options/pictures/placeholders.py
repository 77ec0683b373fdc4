"""Placeholders of pictures among ids: a tokenizer gives one for each picture, a model takes one for each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.data.media import Expanded, Media
from megarl.data.told import KeptPicture
from megarl.options.pictures.picture_rules import PictureRules, PictureTokens


@dataclass(frozen=True)
class FramePair:
    """Two frames of a native video, which are one grid of patches in time."""

    first: KeptPicture
    second: KeptPicture


Showable = KeptPicture | FramePair


def expand(ids: Sequence[int], shown: Sequence[Showable], rules: PictureRules, tokens: PictureTokens) -> Expanded:
    """`ids`, which hold one placeholder for each of `shown`, in their order.

    Raises:
        ValueError: they hold more placeholders, or less, or one of a video where a picture is.
    """
    are_videos = [token == tokens.video_id for token in ids if token in (tokens.image_id, tokens.video_id)]
    if are_videos != [isinstance(item, FramePair) for item in shown]:
        raise ValueError(f"there are {len(are_videos)} placeholders for {len(shown)} pictures")
    expanded: list[int] = []
    media: list[Media] = []
    counts: list[int] = []
    for token in ids:
        count = 1
        if token in (tokens.image_id, tokens.video_id):
            item = shown[len(media)]
            frames = (item.first, item.second) if isinstance(item, FramePair) else (item,)
            grid = (1, frames[0].height // rules.patch, frames[0].width // rules.patch)
            count = grid[1] * grid[2] // rules.merge**2
            digests = tuple(frame.digest for frame in frames)
            media.append(Media("video" if isinstance(item, FramePair) else "image", digests, grid, len(expanded), count))
        counts.append(count)
        expanded += [token] * count
    return Expanded(expanded, media, counts)
