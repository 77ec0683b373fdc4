"""Patches of pictures: transformers' own for final sizes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.data.media import Media
from megarl.errors import DataError
from megarl.options.pictures.picture_rules import PictureRules
from megarl.options.pictures.pixels import Pictures

RULES = PictureRules(14, 2, 2, 1, 10**6, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def picture(folder: Path, name: str, height: int, width: int, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(len(name)).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    found = Image.fromarray(noise.squeeze())
    found.save(folder / f"{name}.png")
    return found


def media(grid: tuple[int, int, int], *digests: str) -> Media:
    return Media("image" if len(digests) == 1 else "video", digests, grid, 0, grid[0] * grid[1] * grid[2] // 4)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (56, 84), (112, 28)])
def test_patches_of_a_picture_are_those_of_transformers_processor(height: int, width: int, tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    shown = picture(tmp_path, "a", height, width)
    expected = Qwen2VLImageProcessorPil(min_pixels=1)(shown, return_tensors="pt")
    grid = tuple(expected["image_grid_thw"][0].tolist())
    assert grid == (1, height // 14, width // 14)
    found = Pictures(tmp_path, RULES).patches(media(grid, "a"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected["pixel_values"], rtol=0, atol=1e-6)


def test_other_sizes_colours_and_grey_pictures(tmp_path: Path) -> None:
    """By hand: patch (row 1, column 0) of the second square has the pixels of rows 16 to 31 and columns 32 to 47."""
    shown = np.array(picture(tmp_path, "grey", 32, 64, "L"))
    rules = PictureRules(16, 2, 2, 1, 10**6, (0.5, 0.25, 0.0), (0.5, 1.0, 2.0))
    found = Pictures(tmp_path, rules).patches(media((1, 2, 4), "grey")).view(8, 3, 2, 16, 16)
    part = torch.from_numpy(shown[16:32, 32:48]).float() / 255
    for colour, (mean, std) in enumerate(zip(rules.mean, rules.std, strict=True)):
        for frame in range(2):
            torch.testing.assert_close(found[6, colour, frame], (part - mean) / std, rtol=0, atol=1e-6)


def test_a_video_has_two_frames_in_each_patch(tmp_path: Path) -> None:
    for name in "abcd":
        picture(tmp_path, name * (1 + ord(name) - ord("a")), 28, 56)
    frames = ("a", "bb", "ccc", "dddd")
    reader = Pictures(tmp_path, RULES)
    alone = [reader.patches(media((1, 2, 4), name)).view(8, 3, 2, 14, 14) for name in frames]
    found = reader.patches(media((2, 2, 4), *frames)).view(2, 8, 3, 2, 14, 14)
    for number, of_frame in enumerate(alone):
        assert torch.equal(found[number // 2, :, :, number % 2], of_frame[:, :, 0])
        assert torch.equal(of_frame[:, :, 0], of_frame[:, :, 1])


def test_pictures_are_read_once_as_long_as_there_is_room(tmp_path: Path) -> None:
    for name in ("a", "bb", "ccc"):
        picture(tmp_path, name, 28, 28)
    reader = Pictures(tmp_path, RULES, kept_bytes=2 * 28 * 28 * 3)
    first = [reader.patches(media((1, 2, 2), name)) for name in ("a", "bb", "a", "ccc")]
    for file in tmp_path.iterdir():
        file.unlink()
    assert torch.equal(reader.patches(media((1, 2, 2), "a")), first[0])
    assert torch.equal(reader.patches(media((1, 2, 2), "ccc")), first[3])
    with pytest.raises(DataError, match=r"bb\.png' is missing"):
        reader.patches(media((1, 2, 2), "bb"))


def test_files_that_are_no_such_pictures_are_refused(tmp_path: Path) -> None:
    picture(tmp_path, "a", 28, 56)
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:300])
    reader = Pictures(tmp_path, RULES)
    for grid, digests, sentence in (
        ((1, 2, 2), ("a",), r"a\.png' is 56 x 28 pixels, but its grid of patches says 28 x 28"),
        ((1, 2, 4), ("cut",), r"cut\.png' is no picture that can be read: "),
        (
            (1, 2, 4),
            ("gone",),
            r"gone\.png' is missing, which a prompt shows; the run's media folder must be seen by every rank",
        ),
        ((2, 2, 4), ("a", "a", "a"), "a video of 3 frames has a grid of 2; it must have 4 frames"),
    ):
        with pytest.raises(DataError, match=sentence):
            reader.patches(media(grid, *digests))
