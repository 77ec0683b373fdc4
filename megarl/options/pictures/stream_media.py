"""The tokens of a stream that show pictures: each picture is computed once, however many tokens and turns show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.data.media import Media


@dataclass(frozen=True)
class StreamMedia:
    """The pictures of a stream, no two of them alike, and the F tokens that stand for their features.

    int64 `[F]` each: `places` in the stream, whose feature it is (`media`, a number among the pictures), and which of its
    picture's features (`numbers`).
    """

    pictures: tuple[Media, ...]
    places: Tensor
    media: Tensor
    numbers: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 `[F]`: each token's feature among those of all pictures, one picture's behind the other's."""
        tokens = torch.tensor([picture.tokens for picture in self.pictures], device=self.media.device)
        return (tokens.cumsum(0) - tokens)[self.media] + self.numbers

    def to(self, device: torch.device) -> StreamMedia:
        """The same with its tensors on `device`."""
        return StreamMedia(self.pictures, *(part.to(device) for part in (self.places, self.media, self.numbers)))

    def of_tokens(self, positions: Tensor, length: int) -> StreamMedia | None:
        """What the tokens at `positions` (int64 `[n]`) of a stream of `length` show, with places among these; None: nothing."""
        index_of = torch.full((length,), -1)
        index_of[positions] = torch.arange(len(positions))
        places = index_of[self.places]
        is_kept = places >= 0
        numbers, media = self.media[is_kept].unique(return_inverse=True)
        if not len(numbers):
            return None
        pictures = tuple(self.pictures[number] for number in numbers.tolist())
        return StreamMedia(pictures, places[is_kept], media, self.numbers[is_kept])


def laid_media(shown: Sequence[tuple[Media, int]]) -> StreamMedia:
    """Pictures with the start of the prompt or response that each is in; there is at least one."""
    numbers: dict[object, int] = {}
    pictures: list[Media] = []
    media: list[int] = []
    for picture, _ in shown:
        media.append(numbers.setdefault(picture.pixels, len(numbers)))
        if len(numbers) > len(pictures):
            pictures.append(picture)
    tokens = torch.tensor([picture.tokens for picture, _ in shown])
    places = [torch.arange(start + picture.place, start + picture.place + picture.tokens) for picture, start in shown]
    return StreamMedia(
        tuple(pictures),
        torch.cat(places),
        torch.repeat_interleave(torch.tensor(media), tokens),
        torch.cat([torch.arange(picture.tokens) for picture, _ in shown]),
    )
