"""From kept pictures to what a vision tower takes: patches of normalised colours. Nothing is resized here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from megarl.data.media import Media
from megarl.errors import DataError
from megarl.options.pictures.picture_rules import PictureRules

KEPT_BYTES = 2**30
"""Of pictures as they are in memory, a byte per colour: those of a step, which reads them for every role and update anew."""
Colours = npt.NDArray[np.uint8]
"""A picture, uint8 `[H, W, 3]`."""


def patches_of(files: Sequence[Path], rules: PictureRules) -> Tensor:
    """The patches of one picture or video, float32 `[t * h * w, 3 * temporal * patch * patch]`, in the order of the towers.

    `files` are its kept pictures: one for a picture, which fills all frames of its patches, or the frames of a video in their
    order, whose last one fills up the last patches. The order is: grids in time, then squares of `merge` by `merge` patches,
    row by row, and in each its patches, row by row; a patch lies by colour, frame, row and column. Values are those of
    `Qwen2VLImageProcessorPil` of transformers 5 for pictures of their final size. Patches that are squares of their own (Kimi)
    lie row by row: float32 `[h * w, 3, patch, patch]`.

    Raises:
        DataError: a file is missing or damaged, has a size that is no multiple of `rules.patch * rules.merge`, or another
            size than the first.
    """
    frames = [_read(file) for file in files]
    multiple = rules.patch * rules.merge
    for file, frame in zip(files, frames, strict=True):
        if frame.shape[0] % multiple or frame.shape[1] % multiple:
            raise DataError(f"'{file}' is {_size(frame)} pixels, but each side must be a multiple of {multiple}")
        if frame.shape != frames[0].shape:
            raise DataError(f"'{file}' is {_size(frame)} pixels, but '{files[0]}', of the same video, is {_size(frames[0])}")
    return _patches(frames, rules)


class Pictures:
    """Reads the pictures of a media folder; what was read last is kept, up to `kept_bytes`."""

    def __init__(self, folder: Path, rules: PictureRules, kept_bytes: int = KEPT_BYTES) -> None:
        self.folder, self.rules, self.kept_bytes = folder, rules, kept_bytes
        self._kept: OrderedDict[Path, Colours] = OrderedDict()

    def patches(self, media: Media) -> Tensor:
        """`patches_of` its files.

        Raises:
            DataError: a file is missing, no picture, or not of the size that the grid says.
        """
        rules, (time, height, width) = self.rules, media.grid
        size = (height * rules.patch, width * rules.patch)
        frames = [self._frame(file, size) for file in media.files(self.folder)]
        if len(frames) > 1 and len(frames) != time * rules.temporal:
            raise DataError(
                f"a video of {len(frames)} frames has a grid of {time}; it must have {time * rules.temporal} frames"
            )
        return _patches(frames, rules)

    def _frame(self, file: Path, size: tuple[int, int]) -> Colours:
        if file in self._kept:
            self._kept.move_to_end(file)
            pixels = self._kept[file]
        else:
            pixels = self._kept[file] = _read(file)
            while sum(picture.nbytes for picture in self._kept.values()) > self.kept_bytes and len(self._kept) > 1:
                self._kept.popitem(last=False)
        if pixels.shape[:2] != size:
            raise DataError(f"'{file}' is {_size(pixels)} pixels, but its grid of patches says {size[1]} x {size[0]}")
        return pixels


def _patches(frames: list[Colours], rules: PictureRules) -> Tensor:
    frames = frames + [frames[-1]] * (-len(frames) % rules.temporal)
    patch, merge = rules.patch, 1 if rules.longest_side else rules.merge
    height, width, colours = frames[0].shape
    steps, rows, columns = len(frames) // rules.temporal, height // (patch * merge), width // (patch * merge)
    pixels = _normalised(rules)[np.stack(frames), np.arange(colours)]
    #                        0      1               2     3      4      5        6      7      8
    laid = pixels.reshape(steps, rules.temporal, rows, merge, patch, columns, merge, patch, colours)
    laid = laid.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    shape = (colours, patch, patch) if rules.longest_side else (-1,)
    return torch.from_numpy(laid.reshape(steps * rows * columns * merge**2, *shape).copy())


def _normalised(rules: PictureRules) -> npt.NDArray[np.float32]:
    """float32 `[256, 3]`: what becomes of each value of each colour; scaled in float64, normalised in float32."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(colours, dtype=np.float32) for colours in (rules.mean, rules.std))
    return np.asarray((scaled[:, None] - mean) / std, dtype=np.float32)


def _read(file: Path) -> Colours:
    try:
        with Image.open(file, formats=["PNG"]) as picture:
            return np.array(picture.convert("RGB"))
    except FileNotFoundError:
        raise DataError(
            f"'{file}' is missing, which a prompt shows; the run's media folder must be seen by every rank"
        ) from None
    except Exception as error:
        raise DataError(f"'{file}' is no picture that can be read: {error}; remove it, and start the run again") from error


def _size(picture: Colours) -> str:
    return f"{picture.shape[1]} x {picture.shape[0]}"
