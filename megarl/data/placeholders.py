"""Placeholders of pictures among ids: a tokenizer gives one for each picture, a model takes one for each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.data.images import KeptPicture
from megarl.data.media import Media, PictureRules


@dataclass(frozen=True)
class Expanded:
    """Ids in which each picture has a placeholder for each of its tokens, and the pictures with their places.

    `counts` says how many of them each id became: 1 but for placeholders.
    """

    ids: list[int]
    media: list[Media]
    counts: list[int]


def expand(ids: Sequence[int], pictures: Sequence[KeptPicture], rules: PictureRules, placeholder: int) -> Expanded:
    """`ids`, which hold `placeholder` once for each of `pictures`, in their order.

    Raises:
        ValueError: they hold it more often, or less.
    """
    if (found := list(ids).count(placeholder)) != len(pictures):
        raise ValueError(f"there are {found} placeholders for {len(pictures)} pictures")
    expanded: list[int] = []
    media: list[Media] = []
    counts: list[int] = []
    for token in ids:
        count = 1
        if token == placeholder:
            picture = pictures[len(media)]
            grid = (1, picture.height // rules.patch, picture.width // rules.patch)
            count = grid[1] * grid[2] // rules.merge**2
            media.append(Media("image", (picture.digest,), grid, len(expanded), count))
        counts.append(count)
        expanded += [token] * count
    return Expanded(expanded, media, counts)
