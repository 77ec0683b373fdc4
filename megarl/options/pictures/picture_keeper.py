"""Keeps the pictures that environments, tools and agents' clients show, as the model takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megarl.data.told import KeptPicture, PicturedText, Shown
from megarl.errors import DataError, PictureError
from megarl.options.pictures.images import Original, describe_original, keep_picture, original_of, upright_rgb
from megarl.options.pictures.picture_rules import PictureRules


@dataclass(frozen=True)
class PictureKeeper:
    """Keeps pictures as the model takes them in `media_folder`; paths that are shown are taken in `image_folder`."""

    rules: PictureRules
    media_folder: Path
    image_folder: str | None = None

    def kept(self, pieces: Iterable[str | Shown]) -> PicturedText:
        """The same text and pictures, the latter kept.

        Raises:
            PictureError: a picture cannot be used; the sentence begins with its number.
            DataError: the media folder cannot be written.
        """
        text, pictures = "", list[tuple[int, KeptPicture]]()
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            else:
                pictures.append((len(text), self._keep(piece.value, len(pictures) + 1)))
        return PicturedText(text, tuple(pictures))

    def _keep(self, value: Any, number: int) -> KeptPicture:
        try:
            return keep_picture(upright_rgb(self._original(value)), self.rules, self.media_folder)
        except PictureError as error:
            raise PictureError(f"picture {number} ({describe_original(value)}) {error}") from error
        except OSError as error:
            raise DataError(f"the media folder '{self.media_folder}' cannot be written: {error}") from error

    def _original(self, value: Any) -> Original:
        if not isinstance(value, np.ndarray):
            return original_of(value, self.image_folder)
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] not in (3, 4):
            raise PictureError(f"is an array of {value.dtype} {list(value.shape)}; it must be uint8 [height, width, 3 or 4]")
        return Image.fromarray(value)

    def to_json(self) -> dict[str, Any]:
        """Plain data, of which `of_json` makes it again."""
        return {"rules": asdict(self.rules), "media_folder": str(self.media_folder), "image_folder": self.image_folder}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> PictureKeeper:
        """Read what `to_json` and JSON made of one."""
        rules: dict[str, Any] = {
            name: tuple(value) if isinstance(value, Sequence) else value for name, value in record["rules"].items()
        }
        return cls(PictureRules(**rules), Path(record["media_folder"]), record["image_folder"])
