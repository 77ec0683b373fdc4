"""The positions of a conversation's tokens on three axes: time, height and width; or on one, where the decoder counts tokens.

Text goes on by one on all axes. A picture's tokens have its own grid's places, from where the text before them ended; what
follows begins one behind the largest of these. That is the rule that the models were trained with (Qwen2-VL, arXiv:2409.12191);
transformers from 5.3 on follows it for images, and for videos no longer (transformers#45381).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.data.media import Media
from megarl.data.stream import Response, Unit
from megarl.errors import ModelError
from megarl.models.vision import Vision


def prompt_positions(length: int, media: Sequence[Media], vision: Vision) -> Tensor:
    """Positions of `length` ids, of a prompt or of it and a response, in which `media` have their places: int64
    `[3, length]`, or `[length]` where the decoder's tokens have one.

    The frames of one video follow each other in time, by the seconds between them where the model counts these. A model that
    tells frames apart by text between them (Qwen3-VL) has each pair of frames as one of the `media`.

    Raises:
        ModelError: a picture is outside these ids or within another one, or its grid is not that of its tokens.
    """
    parts: list[Tensor] = []
    at = start = 0
    for shown in sorted(media, key=lambda shown: shown.place):
        time, height, width = shown.grid
        if shown.place < at or shown.place + shown.tokens > length:
            raise ModelError(
                f"a picture has the places {shown.place} to {shown.place + shown.tokens} of {length} tokens, "
                f"of which those before {at} are taken"
            )
        if height % vision.merge or width % vision.merge or time * height * width != shown.tokens * vision.merge**2:
            raise ModelError(
                f"a picture of {time} x {height} x {width} patches has {shown.tokens} tokens; each of them "
                f"stands for {vision.merge} x {vision.merge} patches"
            )
        parts.append(_text(start, shown.place - at))
        start += shown.place - at
        grid = torch.meshgrid(
            (torch.arange(time) * _interval(shown, vision)).long(),
            torch.arange(height // vision.merge),
            torch.arange(width // vision.merge),
            indexing="ij",
        )
        parts.append(start + torch.stack(grid).flatten(1))
        at, start = shown.place + shown.tokens, int(parts[-1].max()) + 1
    parts.append(_text(start, length - at))
    return torch.cat(parts, dim=1) if vision.mrope is not None else torch.arange(length)


def with_positions(unit: Unit, vision: Vision) -> Unit:
    """The same prompt and responses; those that show pictures have positions as the model counts them, unless they
    had them.

    Raises:
        ModelError: as `prompt_positions`.
    """

    def behind(response: Response) -> Response:
        if not response.media or response.positions is not None:
            return response
        start, length = len(unit.prompt_ids), len(unit.prompt_ids) + len(response.token_ids)
        media = [*unit.media, *(shown.moved(start) for shown in response.media)]
        return replace(response, positions=prompt_positions(length, media, vision)[..., start:])

    positions = unit.positions
    if unit.media and positions is None:
        positions = prompt_positions(len(unit.prompt_ids), unit.media, vision)
    return replace(unit, responses=[behind(response) for response in unit.responses], positions=positions)


def _text(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, -1)


def _interval(shown: Media, vision: Vision) -> float:
    """The time that passes from one grid of a video to the next."""
    if vision.tokens_per_second is None or shown.grid[0] == 1:
        return 1
    if shown.seconds_per_grid is None:
        raise ModelError("a video says nothing of the seconds between its frames, which this model's positions count")
    return vision.tokens_per_second * shown.seconds_per_grid
