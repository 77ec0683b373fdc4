"""From a kept picture to the numbers that a vision tower takes. Torch, numpy and Pillow only: ranks and engines use it, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from megarl.data.media import PictureRules
from megarl.errors import DataError


def patches_of(files: Sequence[Path], rules: PictureRules) -> Tensor:
    """The patches of one picture or video, float32 `[t * h * w, 3 * temporal * patch * patch]`, in the order of the tower.

    `files` are its kept pictures: one for a picture, which stands in every frame of its patches, or the frames of a video in
    their order, whose last one fills up the last patches. `t * h * w` is its grid. The patches of a token follow one another;
    a patch lies by colour, frame, row and column. Values are those of the image processor of Qwen2-VL
    (`Qwen2VLImageProcessorPil` of transformers 5) for pictures that have their final size.

    Raises:
        DataError: a file is missing or damaged, has a size that is no multiple of `rules.patch * rules.merge`, or another
            size than the first.
    """
    frames = [_pixels(file, rules) for file in files]
    for file, frame in zip(files, frames, strict=True):
        if frame.shape != frames[0].shape:
            raise DataError(f"'{file}' is {_size(frame)} pixels, but '{files[0]}', of the same video, is {_size(frames[0])}")
    frames += [frames[-1]] * (-len(frames) % rules.temporal)
    patch, merge = rules.patch, rules.merge
    height, width, colours = frames[0].shape
    steps, rows, columns = len(frames) // rules.temporal, height // (patch * merge), width // (patch * merge)
    pixels = _normalised(rules)[np.stack(frames), np.arange(colours)]
    #                        0      1               2     3      4      5        6      7      8
    laid = pixels.reshape(steps, rules.temporal, rows, merge, patch, columns, merge, patch, colours)
    laid = laid.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return torch.from_numpy(laid.reshape(steps * rows * columns * merge**2, -1).copy())


def _pixels(file: Path, rules: PictureRules) -> npt.NDArray[np.uint8]:
    """uint8 `[H, W, 3]`."""
    try:
        with Image.open(file, formats=["PNG"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    except FileNotFoundError:
        raise DataError(f"the picture '{file}' is missing; a run's media folder must stay where it is") from None
    except Exception as error:
        raise DataError(f"the picture '{file}' is damaged ({error}); remove it, and start the run again") from error
    multiple = rules.patch * rules.merge
    if pixels.shape[0] % multiple or pixels.shape[1] % multiple:
        raise DataError(f"the picture '{file}' is {_size(pixels)} pixels, but each side must be a multiple of {multiple}")
    return pixels


def _size(pixels: npt.NDArray[np.uint8]) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]}"


def _normalised(rules: PictureRules) -> npt.NDArray[np.float32]:
    """float32 `[256, 3]`: what becomes of each value of each colour; scaled in float64, normalised in float32."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(colours, dtype=np.float32) for colours in (rules.mean, rules.std))
    return np.asarray((scaled[:, None] - mean) / std, dtype=np.float32)
