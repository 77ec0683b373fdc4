"""Counts of the patches that pictures of rows will have: sizes are read from the heads of files, and nothing is decoded
or kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

from PIL import Image

from megarl.config.sections import PictureFields
from megarl.data.media import kind_of, source_of
from megarl.data.micro_batches import Grid
from megarl.data.rows import Row
from megarl.errors import PictureError
from megarl.options.pictures.images import FORMATS, final_size, original_of
from megarl.options.pictures.picture_reader import parsed_messages
from megarl.options.pictures.picture_rules import PictureRules
from megarl.options.pictures.video import chosen_frames


def grids_of_row(row: Row, settings: PictureFields, message_keys: Sequence[str], rules: PictureRules) -> tuple[Grid, ...]:
    """The patches of each picture that a row shows, as the run will resize it; a video is its frames.

    The frames of a video's file are counted as `settings.max_frames`, of the largest size.

    Raises:
        PictureError: a picture cannot be read, or there is no size for it.
    """
    grids: list[Grid] = []
    for kind, value in _shown(row, settings, message_keys):
        if kind == "image":
            grids.append(_grid(value, settings, rules))
        elif isinstance(value, list | tuple):
            chosen = chosen_frames(len(value), settings.fps, settings.fps, settings.max_frames)
            grids += [_grid(value[frame], settings, rules) for frame in chosen]
        else:
            grids += [square_grid(rules.max_pixels, rules)] * settings.max_frames
    return tuple(grids)


def square_grid(pixels: float, rules: PictureRules) -> Grid:
    """The patches of a picture that is as near to a square of `pixels` as multiples of a token's side allow, and no larger."""
    side = rules.patch * rules.merge
    tokens = max(1, int(pixels // side**2))
    rows = max(1, int(tokens**0.5))
    return (1, rows * rules.merge, tokens // rows * rules.merge)


def _shown(row: Row, settings: PictureFields, message_keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(`image` or `video`, the value), of columns and of parts of messages."""
    for kind, key in (("image", settings.image_key), ("video", settings.video_key)):
        value = row.get(key) if key is not None else None
        for item in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            yield kind, item
    for key in message_keys:
        messages = row.get(key)
        messages = parsed_messages(messages) if isinstance(messages, str) else messages
        for message in messages if isinstance(messages, list) else []:
            content = message.get("content", message.get("value")) if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else []:
                part_kind = kind_of(part) if isinstance(part, dict) else None
                source = source_of(part) if part_kind else None
                if part_kind is not None and source is not None:
                    yield part_kind, source


def _grid(value: Any, settings: PictureFields, rules: PictureRules) -> Grid:
    original = original_of(value, settings.image_folder)
    if not isinstance(original, Image.Image):
        try:
            with Image.open(BytesIO(original) if isinstance(original, bytes) else original, formats=FORMATS) as image:
                size = image.size
        except Exception as error:
            raise PictureError(f"cannot be read: {error}") from error
    else:
        size = original.size
    width, height = final_size(*size, rules)
    return (1, height // rules.patch, width // rules.patch)
