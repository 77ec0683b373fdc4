"""Environments and tools that show pictures, well and badly, for the tests of episodes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megarl.data.sample import Prompt
from tests.data.seeing_folders import encoded, picture

FIRST, SECOND, THIRD = picture(90, 60, 1), picture(60, 120, 2), picture(64, 64, 3)


def as_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


class Gallery:
    """Begins with FIRST, then shows SECOND and THIRD around a text, then THIRD alone; three turns."""

    opening: Any = {"text": "H<image>ow?", "image": FIRST}  # noqa: RUF012
    steps: Any = ({"text": "<image>Ho<image> th", "images": [SECOND, THIRD]}, THIRD)

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, prompt: Prompt) -> Any:
        return self.opening

    def step(self, text: str) -> tuple[Any, float, bool]:
        self.turn += 1
        return (None, 1.0, True) if self.turn > len(self.steps) else (self.steps[self.turn - 1], 0.5, False)


class InParts(Gallery):
    """The same as chat messages, in other forms of pictures."""

    opening = [  # noqa: RUF012
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "H"},
                {"type": "image", "image": encoded(FIRST)},
                {"type": "text", "text": "ow?"},
            ],
        }
    ]
    steps = (
        [
            {"type": "image_url", "image_url": {"url": as_url(SECOND)}},
            {"type": "text", "text": "Ho"},
            {"type": "image", "image": {"bytes": encoded(THIRD)}},
            {"type": "text", "text": " th"},
        ],
        np.asarray(THIRD),
    )


class InTurns(Gallery):
    """Two messages at once, one without pictures, and a step without any in the form of those with some."""

    opening = None
    steps = ([{"role": "user", "content": "Ho"}, {"role": "user", "content": FIRST}], {"text": "th", "image": None})


class FromRow(Gallery):
    """Shows the row's own picture again."""

    def reset(self, prompt: Prompt) -> Any:
        return {"text": "again", "images": prompt.row["images"]}


class Missing(Gallery):
    steps = ({"text": "t", "images": [FIRST, "no/such.png"]},)


class MarksWithout(Gallery):
    steps = ({"text": "<image><image>", "image": FIRST},)


class Moving(Gallery):
    steps = ([{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "t"}],)


class Forging(Gallery):
    """Spells out a placeholder, which is no picture."""

    steps = ({"text": "<|image_pad|>", "image": THIRD}, "<|image_pad|>")


class BeginsForged(Gallery):
    opening = "<|vision_start|>"


class Wide(Gallery):
    """Text that is cut, with a picture before the cut and one behind it."""

    steps = ({"text": f"{'y' * 60}<image>{'y' * 60}<image>", "images": [FIRST, SECOND]},)


def look(which: str) -> Any:
    """
    Look at something.

    Args:
        which: what
    """
    if which == "damaged":
        return {"text": "see", "image": encoded(FIRST)[:100]}
    if which == "results":
        return [{"title": "a cat", "image": "cat.png"}]
    if which == "own error":
        from megarl.errors import DataError

        raise DataError("of the tool itself")
    return {"text": "see <image> there", "image": {"first": FIRST, "second": SECOND}[which]}


async def look_awaited(which: str) -> Any:
    """
    Look at something, on the event loop.

    Args:
        which: what
    """
    return look(which)


def unwritable(folder: Path) -> Path:
    """A media folder that cannot be made: a file is in its place."""
    file = folder / "taken"
    file.write_text("")
    return file
