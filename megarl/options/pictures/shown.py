"""The kept pictures of a run for people, for `observe/sample_media.py`: their sizes, and data URLs that a page can hold.

Reads the media folder that the run wrote; a file that is missing or damaged is said in words.
"""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

from PIL import Image

from megarl.options.pictures.images import LARGEST_PIXELS

SIDE = 320
"""Pixels of the longer side of a picture in a page; smaller ones stay as they are."""
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


def size_or_fault(digest: str, folder: Path) -> tuple[int, int] | str:
    """Width and height of a kept picture, or a few words that say why it has none."""
    if not _DIGEST.fullmatch(digest):
        return "is no name of a kept picture"
    try:
        with Image.open(folder / f"{digest}.png", formats=["PNG"]) as picture:
            width, height = picture.size
    except FileNotFoundError:
        return "the file is missing"
    except Exception as error:  # noqa: BLE001 - Pillow raises many kinds for a damaged file
        return f"cannot be read: {error}"
    return (width, height) if width * height <= LARGEST_PIXELS else "has too many pixels to be shown"


def scaled(file: Path) -> str:
    """The picture as a data URL, PNG or JPEG, whichever is smaller."""
    with Image.open(file, formats=["PNG"]) as picture:
        shown = picture.convert("RGB")
    shown.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)
    written = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 85})):
        buffer = BytesIO()
        shown.save(buffer, kind.upper(), **options)
        written.append((kind, buffer.getvalue()))
    kind, content = min(written, key=lambda one: len(one[1]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
