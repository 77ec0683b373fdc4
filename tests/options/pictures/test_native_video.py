"""Native videos of Qwen3-VL: ids, grids, sizes and pixels are those of transformers' processor; other models are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.row_media import open_media
from megarl.data.sample import Prompt
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import ModelError, PictureError
from megarl.options.pictures.images import final_frame_size
from megarl.options.pictures.picture_reader import PictureReader
from megarl.options.pictures.picture_rules import PictureRules
from megarl.options.pictures.pixels import Pictures
from tests.data.seeing_folders import PROCESSORS, SPECIAL, picture, seeing_folder
from tests.options.pictures.test_video import _video

SIZE = {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}
SETTINGS = {"size": SIZE, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2} | {
    name: PROCESSORS["qwen3_vl"][name] for name in ("image_mean", "image_std")
}
FINAL = [np.asarray(picture(96, 64, seed)) for seed in range(4)]
"""Frames of a size that no rule changes."""
LARGE = [np.asarray(picture(500, 333, seed)) for seed in range(6)]


def folder_of(path: Path, family: str = "qwen3_vl", **changes: Any) -> Path:
    folder = seeing_folder(path / "model", family)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS | changes))
    return folder


def reader_of(path: Path, folder: Path, **fields: Any) -> tuple[DataConfig, PictureReader]:
    train = SourceConfig(source="jsonl", path="rows.jsonl")
    data = DataConfig(**{"train": train, "prompt_key": "problem", "video": "native", "max_prompt_tokens": 4096} | fields)
    reader = open_media(data, str(folder), load_tokenizer(str(folder)), path / "run")
    assert isinstance(reader, PictureReader)
    return data, reader


def prompt_of(path: Path, row: dict[str, Any], **fields: Any) -> Prompt:
    folder = path / "model" if (path / "model").exists() else folder_of(path)
    data, reader = reader_of(path, folder, **fields)
    [prompt] = PromptBuilder(load_tokenizer(str(folder)), data, (), reader).build([row], prefix="train")
    return prompt


def processed(
    path: Path, content: list[dict[str, Any]], videos: list[list[Any]], timing: list[dict[str, Any]], images: Any = ()
) -> Any:
    """What transformers' processor makes of one user turn, in a process with torchvision."""
    arrays = {f"video{number}": np.stack(frames) for number, frames in enumerate(videos)}
    arrays |= {f"image{number}": np.asarray(image) for number, image in enumerate(images)}
    messages = json.dumps([{"role": "user", "content": content}])
    np.savez(path / "in.npz", messages=messages, size=json.dumps(SIZE), metadata=json.dumps(timing), **arrays)
    command = [sys.executable, "-m", "tests.data.torchvision_processor", str(path / "in.npz"), str(path / "out.npz")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return np.load(path / "out.npz")


def patches_of(prompt: Prompt, path: Path, folder: Path) -> torch.Tensor:
    kept = Pictures(path / "run/media", reader_of(path, folder)[1].model.rules)
    return torch.cat([kept.patches(media) for media in prompt.media if media.kind == "video"])


def assert_covered(prompt: Prompt) -> None:
    for kind, token in (("image", "<|image_pad|>"), ("video", "<|video_pad|>")):
        covered = [at for one in prompt.media if one.kind == kind for at in range(one.place, one.place + one.tokens)]
        assert covered == [at for at, found in enumerate(prompt.prompt_ids) if found == SPECIAL.index(token)]


VIDEO, TEXT = {"type": "video"}, {"type": "text", "text": "How? "}


@pytest.mark.slow
def test_a_prompt_with_native_videos_is_the_processors(tmp_path: Path) -> None:
    """Two videos and a picture among text that could be joined with the times; frames of final size, so pixels compare, too."""
    pytest.importorskip("av")
    image = picture(64, 64, 9)
    frames = [Image.fromarray(frame) for frame in FINAL]
    row = {"problem": "How <video>?<image> t<video>", "videos": [frames, frames[:2]], "images": [image]}
    prompt = prompt_of(tmp_path, row, fps=3.0)
    content = [
        {"type": "text", "text": "How "}, VIDEO, {"type": "text", "text": "?"}, {"type": "image"},
        {"type": "text", "text": " t"}, VIDEO,
    ]  # fmt: skip
    timing = [{"fps": 3.0, "frames_indices": [*range(n)], "total_num_frames": n} for n in (4, 2)]
    expected = processed(tmp_path, content, [FINAL, FINAL[:2]], timing, [image])
    assert prompt.prompt_ids == expected["ids"].tolist()
    assert "<0.2 seconds><|vision_start|><|video_pad|><|vision_end|><0.8 seconds>" in prompt.prompt_text
    assert [list(media.grid) for media in prompt.media if media.kind == "video"] == [
        [1, *grid[1:]] for grid in expected["grids"].tolist() for _ in range(grid[0])
    ]
    patches = patches_of(prompt, tmp_path, tmp_path / "model")
    torch.testing.assert_close(patches, torch.from_numpy(expected["pixels"]), rtol=0, atol=1e-6)
    assert_covered(prompt)
    assert prompt.row["videos"][1]["seconds"] == [0.0, 1 / 3]


@pytest.mark.slow
def test_a_decoded_video_has_its_own_times_and_size(tmp_path: Path) -> None:
    """Frames 0, 6, 12, 17, 23 and 29 of a video at 10 a second, which the processor is given as they are in the file."""
    pytest.importorskip("av")
    (tmp_path / "a.mkv").write_bytes(_video())
    prompt = prompt_of(tmp_path, {"problem": "<video>How? ", "videos": str(tmp_path / "a.mkv")}, fps=2.0)
    chosen = [0, 6, 12, 17, 23, 29]
    raw = [np.zeros((56, 84, 3), np.uint8)] * 6  # ids and grids follow from sizes and times alone
    timing = [{"fps": 10.0, "frames_indices": chosen, "total_num_frames": 30}]
    expected = processed(tmp_path, [VIDEO, TEXT], [raw], timing)
    assert prompt.prompt_ids == expected["ids"].tolist()
    assert [list(media.grid) for media in prompt.media] == [[1, *expected["grids"][0][1:].tolist()]] * 3
    assert_covered(prompt)


@pytest.mark.slow
def test_frames_are_resized_together(tmp_path: Path) -> None:
    """Six large frames within the limits of all together, and within `data.max_pixels` for each."""
    frames = [Image.fromarray(frame) for frame in LARGE]
    row = {"problem": "How? ", "videos": [frames]}  # without a mark: before the text
    prompt = prompt_of(tmp_path, row, fps=2.0)
    timing = [{"fps": 2.0, "frames_indices": [*range(6)], "total_num_frames": 6}]
    expected = processed(tmp_path, [VIDEO, TEXT], [LARGE], timing)
    assert prompt.prompt_ids == expected["ids"].tolist()
    smaller = prompt_of(tmp_path, row, fps=2.0, max_pixels=5 * 32 * 32)
    assert {media.grid for media in smaller.media} == {(1, 2, 4)}  # of at most 5 tokens; 500 x 333 is 64 x 32
    assert max(media.tokens for media in prompt.media) > 5


RULES = PictureRules(16, 2, 2, 4096, 65536, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(1, 4000), height=st.integers(1, 4000), pairs=st.integers(1, 400),
    least=st.integers(1, 10**6), more=st.integers(1, 10**8),
)  # fmt: skip
def test_sizes_of_frames_are_those_of_transformers(width: int, height: int, pairs: int, least: int, more: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    rules = PictureRules(16, 2, 2, least, least + more, RULES.mean, RULES.std)
    try:
        expected = smart_resize(2 * pairs, height, width, 2, 32, least, least + more)[::-1]
    except ValueError:
        with pytest.raises(PictureError, match="a side must be at most 200 times the other"):
            final_frame_size(width, height, 2 * pairs, rules)
        return
    if least <= 2 * pairs * expected[0] * expected[1] <= least + more:
        assert final_frame_size(width, height, 2 * pairs, rules) == expected
        assert final_frame_size(*expected, 2 * pairs, rules) == expected
    else:
        with pytest.raises(PictureError, match=r"data\.min_pixels and data\.max_pixels must be further apart"):
            final_frame_size(width, height, 2 * pairs, rules)


def test_a_single_frame_is_shown_twice(tmp_path: Path) -> None:
    prompt = prompt_of(tmp_path, {"problem": "<video>", "videos": [[Image.fromarray(FINAL[0])]]})
    [media] = prompt.media
    assert (media.digests[0], media.grid) == (media.digests[1], (1, 4, 6))
    assert "<0.0 seconds>" in prompt.prompt_text


def test_without_a_template_and_in_supervised_rows_it_is_the_same_video(tmp_path: Path) -> None:
    row = {"problem": "How <video>?", "videos": [[Image.fromarray(frame) for frame in FINAL]], "answer": "3"}
    plain = prompt_of(tmp_path, row, chat_template="never")
    of_chat = prompt_of(tmp_path, row)
    start = of_chat.media[0].place - plain.media[0].place
    assert of_chat.prompt_ids[start : start + len(plain.prompt_ids)] == plain.prompt_ids
    _, reader = reader_of(tmp_path, tmp_path / "model")
    keys = SupervisedSettings(prompt_key="problem", response_key="answer", max_tokens=4096)
    [sample] = SupervisedBuilder(load_tokenizer(str(tmp_path / "model")), "sft", keys, reader).build([row], prefix="train")
    assert (sample.prompt_ids, sample.media) == (of_chat.prompt_ids, of_chat.media)


def test_frames_of_two_sizes_are_refused(tmp_path: Path) -> None:
    frames = [Image.fromarray(FINAL[0]), Image.fromarray(LARGE[0])]
    sentence = r"video 1 of 1 .* has frames of 96x64 and of 500x333 pixels; those of a native video must be of one size"
    with pytest.raises(PictureError, match=sentence):
        prompt_of(tmp_path, {"problem": "<video>", "videos": [frames]})


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("qwen2_vl", {}, r"data.video is 'native', which '.*' \(qwen2_vl\) has not in megarl; it must be 'frames'"),
        ("qwen3_vl", {"size": {}}, "has no video_preprocessor_config.json with size.shortest_edge and size.longest_edge"),
        ("qwen3_vl", {"patch_size": 14}, "its video processor has other patches or colours than its image processor"),
        ("qwen3_vl", {"cap_pixels_per_frame": True}, "cap_pixels_per_frame; data.video must be 'frames'"),
    ],
)
def test_models_without_such_videos_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], sentence: str) -> None:
    folder = folder_of(tmp_path, family, **changes)
    with pytest.raises(ModelError, match=sentence):
        reader_of(tmp_path, folder)
