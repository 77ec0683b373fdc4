"""Words and pictures that a policy is told between its turns: the forms that are understood, and text with kept pictures.

Nobody but who runs the episode has the pictures themselves; what an episode tells names kept files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from megarl.data.media import MARKS, kind_of, source_of
from megarl.errors import PictureError

TEXT_AND_PICTURES = {"text", "image", "images"}
"""Keys of a text and its pictures, as verl's `ToolResponse` and verl-agent's observations have them."""

PARTS = {"text", *(name for kind in MARKS for name in (kind, f"{kind}_url"))}
"""Types of the parts of a chat message. Other lists hold no pictures, whatever their fields are called."""


@dataclass(frozen=True)
class KeptPicture:
    """A picture in the media folder, and its size in pixels."""

    digest: str
    width: int
    height: int


@dataclass(frozen=True)
class PicturedText:
    """Text in which pictures stand, each before the character with its number."""

    text: str
    pictures: tuple[tuple[int, KeptPicture], ...] = ()

    @property
    def pieces(self) -> list[str | KeptPicture]:
        """Text and pictures in their order; no text is empty."""
        pieces: list[str | KeptPicture] = []
        done = 0
        for at, picture in self.pictures:
            pieces += [self.text[done:at], picture]
            done = at
        return [piece for piece in (*pieces, self.text[done:]) if piece != ""]

    def beginning(self, characters: int) -> PicturedText:
        """The first `characters` of the text, and the pictures before its end."""
        return PicturedText(self.text[:characters], tuple(entry for entry in self.pictures if entry[0] <= characters))

    def content(self, folder: Path) -> str | list[dict[str, Any]]:
        """The content of a chat message: text, or parts in which each picture is the path of its file in `folder`."""
        if not self.pictures:
            return self.text
        return [
            {"type": "text", "text": piece}
            if isinstance(piece, str)
            else {"type": "image", "image": str(folder / f"{piece.digest}.png")}
            for piece in self.pieces
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data, of which `of_json` makes it again."""
        return {"text": self.text, "pictures": [[at, asdict(picture)] for at, picture in self.pictures]}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> PicturedText:
        """Read what `to_json` and JSON made of one."""
        return cls(record["text"], tuple((at, KeptPicture(**picture)) for at, picture in record["pictures"]))


@dataclass(frozen=True)
class Shown:
    """A picture as somebody shows it, not looked at yet."""

    value: Any


Pieces = list[str | Shown]


class MediaKeeper(Protocol):
    """Keeps pictures that are shown, as the model takes them, in a run's media folder."""

    @property
    def media_folder(self) -> Path: ...

    def kept(self, pieces: Iterable[str | Shown]) -> PicturedText:
        """The same text and pictures, the latter kept.

        Raises:
            PictureError: a picture cannot be used; the sentence begins with its number.
            DataError: the media folder cannot be written.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Plain data, of which the option that brings it makes it again in another process."""
        ...


def pieces_of(content: Any) -> Pieces | None:
    """Text and pictures of `content`; None if it is of none of the forms that hold pictures.

    These are a picture (PIL, or a uint8 array `[H, W, 3]`), a text with pictures `{"text": …, "images": […]}` or one `image`,
    which stand at its `<image>` marks or else before it, and the parts of a chat message, one of which is a picture.

    Raises:
        PictureError: there are not as many marks as pictures, or a part is a video, has no picture, or is of no known kind.
    """
    if isinstance(content, Image.Image | np.ndarray):
        return [Shown(content)]
    if isinstance(content, dict) and content.keys() <= TEXT_AND_PICTURES:
        return _at_marks(content)
    is_parts = isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in PARTS for part in content)
    if is_parts and any(kind_of(part) is not None for part in content):
        return [_of_part(part) for part in content]
    return None


def _at_marks(content: Mapping[str, Any]) -> Pieces | None:
    images = content.get("images")
    values = [content["image"]] if content.get("image") is not None else []
    values += [] if images is None else [*images] if isinstance(images, list | tuple) else [images]
    text = content.get("text") or ""
    if not values or not isinstance(text, str):
        return None
    first, *others = text.split(MARKS["image"])
    if not others:
        return [*map(Shown, values), text]
    if len(others) != len(values):
        raise PictureError(f"there are {len(values)} pictures for {len(others)} marks {MARKS['image']} in the text")
    return [first, *(piece for value, after in zip(values, others, strict=True) for piece in (Shown(value), after))]


def _of_part(part: dict[str, Any]) -> str | Shown:
    kind = kind_of(part)
    if kind == "video":
        raise PictureError("a part is a video; its frames must be shown as pictures")
    if kind == "image":
        value = source_of(part)
        if value is None:
            raise PictureError("a part of type image has no picture")
        return Shown(value)
    if not isinstance(part.get("text"), str):
        raise PictureError(f"a part is {part!r:.80}; it must be text or a picture")
    return str(part["text"])
