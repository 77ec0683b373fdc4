"""From a picture's files to what a vision tower takes: patches of normalised colours. Nothing is resized here."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from megarl.data.media import Media, PictureRules
from megarl.errors import DataError

KEPT_BYTES = 2**30
"""Of pictures as they are in memory, a byte per colour: those of a step, which reads them for every role and update anew."""


class Pictures:
    """Reads the pictures of a media folder; what was read last is kept, up to `kept_bytes`."""

    def __init__(self, folder: Path, rules: PictureRules, kept_bytes: int = KEPT_BYTES) -> None:
        self.folder, self.rules, self.kept_bytes = folder, rules, kept_bytes
        self._kept: OrderedDict[Path, npt.NDArray[np.uint8]] = OrderedDict()

    def patches(self, media: Media) -> Tensor:
        """float32 `[time * height * width of the grid, 3 * temporal * patch * patch]`, in the order that the towers take.

        That is: grids in time, then squares of `merge` by `merge` patches, row by row, and in each its patches, row by row. A
        picture fills all `temporal` frames of its grid.

        Raises:
            DataError: a file is missing, no picture, or not of the size that the grid says.
        """
        rules, (time, height, width) = self.rules, media.grid
        size = (height * rules.patch, width * rules.patch)
        frames = [self._read(file, size) for file in media.files(self.folder)]
        if len(frames) == 1:
            frames *= time * rules.temporal
        if len(frames) != time * rules.temporal:
            raise DataError(
                f"a video of {len(frames)} frames has a grid of {time}; it must have {time * rules.temporal} frames"
            )
        colours = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)  # [T, C, H, W]
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (rules.mean, rules.std))
        normal = (colours.float() / 255 - mean) / std
        merge = rules.merge
        parts = normal.view(
            time, rules.temporal, 3, height // merge, merge, rules.patch, width // merge, merge, rules.patch
        )  # fmt: skip
        return parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * height * width, -1)

    def _read(self, file: Path, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """uint8 `[H, W, 3]`."""
        if file in self._kept:
            self._kept.move_to_end(file)
            found = self._kept[file]
        else:
            found = self._kept[file] = _read(file)
            while sum(picture.nbytes for picture in self._kept.values()) > self.kept_bytes and len(self._kept) > 1:
                self._kept.popitem(last=False)
        if found.shape[:2] != size:
            raise DataError(
                f"'{file}' is {found.shape[1]} x {found.shape[0]} pixels, but its grid of patches says {size[1]} x {size[0]}"
            )
        return found


def _read(file: Path) -> npt.NDArray[np.uint8]:
    try:
        with Image.open(file) as picture:
            return np.array(picture.convert("RGB"))
    except FileNotFoundError:
        raise DataError(
            f"'{file}' is missing, which a prompt shows; the run's media folder must be seen by every rank"
        ) from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"'{file}' is no picture that can be read: {error}") from None
