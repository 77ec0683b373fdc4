"""The patches of kept pictures are those of transformers' image processor, in its order, and of a video those of its frames."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.errors import DataError, ModelError
from megarl.options.pictures.images import final_size, keep_picture, shrunk_size
from megarl.options.pictures.picture_rules import load_picture_rules
from megarl.options.pictures.pixels import patches_of
from tests.data.seeing_folders import PROCESSORS, image_processor, picture, seeing_folder
from tests.padded_pictures import navit_resize


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


@pytest.mark.parametrize("size", [(1, 1), (27, 29), (28, 28), (400, 30), (30, 400), (337, 335), (1000, 999), (339, 240)])
def test_sizes_of_kimis_pictures_are_transformers_own(size: tuple[int, int], tmp_path: Path) -> None:
    rules = load_picture_rules(seeing_folder(tmp_path, "kimi_k25"))
    (height, width), filled = navit_resize()(size[1], size[0], 14, 2, 400, 24)
    assert shrunk_size(*size, rules) == (width, height)
    assert final_size(*size, rules) == filled[::-1]


OF_HUB = {"in_patch_limit": 300, "patch_limit_on_one_side": 20, "patch_size": 14, "merge_kernel_size": 2}
OF_HUB |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.6], "fixed_output_tokens": None}


def test_kimis_settings_as_the_hub_writes_them_and_those_that_are_refused(tmp_path: Path) -> None:
    folder = seeing_folder(tmp_path, "kimi_k25")
    file, own = folder / "preprocessor_config.json", json.loads((folder / "preprocessor_config.json").read_text())
    file.write_text(json.dumps({"media_proc_cfg": OF_HUB}))
    rules = load_picture_rules(folder)
    assert (rules.patch, rules.merge, rules.temporal, rules.longest_side, rules.max_pixels) == (14, 2, 1, 20, 300 * 196)
    assert (rules.mean, rules.std) == ((0.5, 0.4, 0.3), (0.5, 0.5, 0.6))
    for settings, sentence in (
        ({"media_proc_cfg": OF_HUB | {"fixed_output_tokens": 9}}, "fixed_output_tokens is 9; it must be None"),
        (own | {"resample": 2}, "resample is 2; it must be 3"),
        (own | {"size": {"max_height": 24, "max_width": 12}}, "must be equal max_height and max_width"),
        (own | {"max_patches": 0}, "max_patches is 0; it must be a positive integer"),
        (
            own | {"patch_size": 16},
            "has patches of 16 pixels, 2 by 2 of them a token, but config.json's tower has patch_size 14",
        ),
    ):
        (folder / "config.json").write_text(json.dumps({"vision_config": {"patch_size": 14}}))
        file.write_text(json.dumps(settings))
        with pytest.raises(ModelError, match=sentence):
            load_picture_rules(folder)


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
