"""The patches of kept pictures are those of transformers' image processor, in its order, and of a video those of its frames."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.errors import DataError
from megarl.options.pictures.images import keep_picture
from megarl.options.pictures.picture_rules import load_picture_rules
from megarl.options.pictures.pixels import patches_of
from tests.data.seeing_folders import PROCESSORS, image_processor, picture, seeing_folder


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("size", [(112, 224), (50, 300), (901, 444)])
def test_patches_are_those_of_transformers(tmp_path: Path, family: str, size: tuple[int, int]) -> None:
    rules = load_picture_rules(seeing_folder(tmp_path / "model", family))
    expected = image_processor(family)([picture(*size)], return_tensors="pt")
    kept = keep_picture(picture(*size), rules, tmp_path)
    patches = patches_of([tmp_path / f"{kept.digest}.png"], rules)
    assert patches.dtype == torch.float32
    assert [1, kept.height // rules.patch, kept.width // rules.patch] == expected["image_grid_thw"][0].tolist()
    torch.testing.assert_close(patches, expected["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_a_video_has_two_frames_in_a_patch(tmp_path: Path, frames: int) -> None:
    """By the formula: patch (t, row, column) of token order, then colour, frame, y, x; the last frame fills up."""
    rules = load_picture_rules(seeing_folder(tmp_path / "model"))
    pictures = [picture(84, 56, seed) for seed in range(frames)]
    kept = [keep_picture(one, rules, tmp_path) for one in pictures]
    patches = patches_of([tmp_path / f"{one.digest}.png" for one in kept], rules)
    pictures += pictures[-1:] * (frames % 2)
    expected = []
    mean, std = np.float32(rules.mean), np.float32(rules.std)  # type: ignore[arg-type]
    for time in range(len(pictures) // 2):
        for row, column in [(2 * r + y, 2 * c + x) for r in range(2) for c in range(3) for y in range(2) for x in range(2)]:
            cut = (slice(14 * row, 14 * row + 14), slice(14 * column, 14 * column + 14))
            both = [(np.asarray(one)[cut] / np.float32(255) - mean) / std for one in pictures[2 * time : 2 * time + 2]]
            expected.append(np.stack(both).transpose(3, 0, 1, 2).reshape(-1))
    torch.testing.assert_close(patches, torch.tensor(np.stack(expected)), rtol=0, atol=1e-6)


def test_files_that_are_missing_damaged_or_of_another_size_are_named(tmp_path: Path) -> None:
    rules = load_picture_rules(seeing_folder(tmp_path / "model"))
    kept = [tmp_path / f"{keep_picture(picture(*size), rules, tmp_path).digest}.png" for size in ((84, 56), (56, 84))]
    with pytest.raises(DataError, match=r"no\.png' is missing, which a prompt shows; the run's media folder must be seen"):
        patches_of([tmp_path / "no.png"], rules)
    with pytest.raises(DataError, match=r"is 56 x 84 pixels, but '.*', of the same video, is 84 x 56"):
        patches_of(kept, rules)
    with pytest.raises(DataError, match="is 84 x 56 pixels, but each side must be a multiple of 32"):
        patches_of(kept[:1], replace(rules, patch=16))
    kept[0].write_bytes(kept[0].read_bytes()[:500])
    with pytest.raises(DataError, match=r"is no picture that can be read: .*; remove it, and start the run again"):
        patches_of(kept[:1], rules)
