"""What transformers' image processor of Kimi-K2.5 makes of pictures, without torchvision, which its module imports.

Sizes are its own function's, read out of its file; black is added on the right and below, and values are normalised by the
formula. Pictures are shrunk by Pillow, as the processor in the published folder does it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

MEAN = STD = 0.5


@cache
def navit_resize() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """transformers' function: height, width, … -> (height, width) shrunk, (height, width) filled up."""
    file = Path(transformers.__file__).parent / "models/kimi_k25/image_processing_kimi_k25.py"
    found = next(
        part for part in ast.parse(file.read_text()).body if isinstance(part, ast.FunctionDef) and part.name == "navit_resize"
    )
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([found], []), str(file), "exec"), names)
    return names["navit_resize"]


def padded_inputs(
    pictures: Sequence[Image.Image], patch: int = 14, merge: int = 2, max_patches: int = 16384, longest: int = 512
) -> dict[str, torch.Tensor]:
    """`pixel_values` float32 `[patches, 3, patch, patch]` and `image_grid_thw`; nothing of no pictures."""
    pixels, grids = [], []
    for picture in pictures:
        size, (height, width) = navit_resize()(picture.height, picture.width, patch, merge, max_patches, longest)
        shrunk = picture.convert("RGB").resize(size[::-1], Image.Resampling.BICUBIC)
        filled = np.zeros((height, width, 3), dtype=np.float64)
        filled[: size[0], : size[1]] = np.asarray(shrunk)
        values = (filled / 255 - MEAN) / STD
        rows, columns = height // patch, width // patch
        cut = [
            values[patch * r : patch * r + patch, patch * c : patch * c + patch] for r in range(rows) for c in range(columns)
        ]
        pixels.append(np.stack(cut).transpose(0, 3, 1, 2))
        grids.append([1, rows, columns])
    if not pictures:
        return {}
    return {"pixel_values": torch.tensor(np.concatenate(pixels), dtype=torch.float32), "image_grid_thw": torch.tensor(grids)}
