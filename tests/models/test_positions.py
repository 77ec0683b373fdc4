"""Positions on three axes: transformers' element by element for pictures, and by hand for videos."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megarl.data.media import Media
from megarl.data.stream import Response, Unit
from megarl.errors import ModelError
from megarl.options.pictures.positions import prompt_positions, with_positions
from tests.seeing import IMAGE, SEEING, VIDEO, hugging_face, vision_of

model = cache(hugging_face)


def picture(place: int, height: int, width: int) -> Media:
    return Media("image", ("x",), (1, height, width), place, height * width // 4)


def video(place: int, grid: tuple[int, int, int], seconds: float | None = None) -> Media:
    return Media("video", ("x",), grid, place, grid[0] * grid[1] * grid[2] // 4, seconds)


@pytest.mark.parametrize("family", [family for family in SEEING if family != "kimi_k25"])
@pytest.mark.parametrize("seed", range(5))
def test_positions_of_pictures_are_transformers_own(family: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    ids, media = [1] * number(1, 5), []
    for _ in range(seed):
        media.append(picture(len(ids), 2 * number(1, 6), 2 * number(1, 6)))
        ids += [IMAGE] * media[-1].tokens + [1] * number(1, 5)
    tokens = torch.tensor(ids)[None]
    grids = torch.tensor([shown.grid for shown in media]) if media else None
    expected, _ = model(family).model.get_rope_index(tokens, (tokens == IMAGE).int(), grids)
    found = prompt_positions(len(ids), media[::-1], vision_of(family))
    assert found.dtype == torch.int64
    assert torch.equal(found, expected[:, 0])


def test_a_decoder_that_counts_tokens_counts_those_of_pictures() -> None:
    vision = vision_of("kimi_k25")
    assert prompt_positions(9, [picture(2, 4, 4)], vision).tolist() == [*range(9)]
    with pytest.raises(ModelError, match="a picture has the places 6 to 10 of 9 tokens"):
        prompt_positions(9, [picture(6, 4, 4)], vision)
    response = Response(0, torch.arange(7), torch.ones(7).bool(), media=(picture(1, 4, 4),))
    placed = with_positions(Unit(torch.arange(5), [response], ()), vision)
    assert placed.positions is None
    assert placed.responses[0].positions is not None
    assert placed.responses[0].positions.tolist() == [*range(5, 12)]


def test_time_goes_on_by_the_seconds_between_the_frames_of_qwen2_5_vl() -> None:
    """2 tokens a second, 1.3 seconds a grid: 0, 2 (2.6), 5 (5.2); the text behind begins at the largest position + 1."""
    found = prompt_positions(14, [video(2, (3, 4, 4), 1.3)], vision_of("qwen2_5_vl")).tolist()
    assert found[0] == [0, 1, *[2] * 4, *[4] * 4, *[7] * 4]
    assert found[1] == [0, 1, *[2, 2, 3, 3] * 3]
    assert found[2] == [0, 1, *[2, 3, 2, 3] * 3]
    behind = prompt_positions(16, [video(2, (3, 4, 4), 1.3)], vision_of("qwen2_5_vl"))
    assert behind[:, 14:].tolist() == [[8, 9]] * 3


def test_text_behind_a_long_video_follows_its_last_frame() -> None:
    """The example of transformers#45381's kind: transformers puts it at 6."""
    shown = video(3, (8, 4, 6), 1.0)
    found = prompt_positions(3 + shown.tokens + 1, [shown], vision_of("qwen2_5_vl"))
    assert found[:, -1].tolist() == [18] * 3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl"])
def test_inside_a_video_positions_are_transformers_own(family: str) -> None:
    shown = video(3, (4, 4, 6), 1.0)
    tokens = torch.tensor([1, 1, 1, *[VIDEO] * shown.tokens, 1, 1])[None]
    given: dict[str, Any] = {"video_grid_thw": torch.tensor([shown.grid])}
    if family == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([1.0])
    expected, _ = model(family).model.get_rope_index(tokens, 2 * (tokens == VIDEO).int(), **given)
    found = prompt_positions(tokens.shape[1], [shown], vision_of(family))
    assert torch.equal(found[:, :-2], expected[:, 0, :-2])


def test_frames_with_text_between_them_are_pictures_of_their_own() -> None:
    media = [video(2, (1, 4, 6)), video(11, (1, 4, 6))]
    tokens = torch.tensor([1, 1, *[VIDEO] * 6, 1, 1, 1, *[VIDEO] * 6, 1])[None]
    grids = torch.tensor([[2, 4, 6]])
    expected, _ = model("qwen3_vl").model.get_rope_index(tokens, 2 * (tokens == VIDEO).int(), video_grid_thw=grids)
    assert torch.equal(prompt_positions(18, media, vision_of("qwen3_vl")), expected[:, 0])


@pytest.mark.parametrize(
    ("media", "sentence"),
    [
        ([picture(8, 4, 4)], "a picture has the places 8 to 12 of 10 tokens, of which those before 0 are taken"),
        ([picture(1, 4, 4), picture(4, 4, 4)], "places 4 to 8 of 10 tokens, of which those before 5 are taken"),
        ([replace(picture(1, 4, 4), tokens=5)], "1 x 4 x 4 patches has 5 tokens; each of them stands for 2 x 2"),
        ([replace(picture(1, 3, 4), tokens=3)], "1 x 3 x 4 patches has 3 tokens; each of them stands for 2 x 2"),
        ([video(1, (2, 4, 4))], "a video says nothing of the seconds between its frames"),
    ],
)
def test_pictures_that_do_not_fit_their_prompt_are_refused(media: list[Media], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        prompt_positions(10, media, vision_of("qwen2_5_vl"))
