"""Boxes and read text are graded as their documents say: against counted pixels, all pairings, and the textbook's table."""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.media import Media
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards import RewardSources, build_rewards
from megarl.rewards.builtin.boxes import iou, matched
from megarl.rewards.builtin.edit_distance import edit_distance

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))


def _rewards(name: str, **args: Any) -> RewardSources:
    return build_rewards([RewardConfig(name=name, args=args)], DATA)


def _sample(response: str, gold: Any, **row: Any) -> Sample:
    return Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text=response, row={"answer": gold, **row})


def _some_boxes(number: int, rng: random.Random) -> list[tuple[float, float, float, float]]:
    found = []
    for _ in range(number):
        x1, y1 = rng.randrange(10), rng.randrange(10)
        found.append((x1, y1, x1 + rng.randrange(1, 8), y1 + rng.randrange(1, 8)))
    return found


def _counted_iou(left: Any, right: Any) -> float:
    covered = np.zeros((2, 20, 20), dtype=bool)
    for number, (x1, y1, x2, y2) in enumerate((left, right)):
        covered[number, int(y1) : int(y2), int(x1) : int(x2)] = True
    return float((covered[0] & covered[1]).sum() / (covered[0] | covered[1]).sum())


def test_iou_is_that_of_counted_pixels() -> None:
    rng = random.Random(0)
    for _ in range(300):
        left, right = _some_boxes(2, rng)
        assert iou(left, right) == _counted_iou(left, right)
    assert iou((0, 0, 2, 2), (2, 0, 4, 2)) == 0  # side by side
    assert iou((3, 3, 1, 1), (1, 1, 3, 3)) == iou((1, 1, 1, 1), (1, 1, 1, 1)) == 0


def test_the_most_boxes_are_matched() -> None:
    rng = random.Random(1)
    differ_from_greedy = 0
    for _ in range(300):
        answered, gold = _some_boxes(rng.randrange(6), rng), _some_boxes(rng.randrange(1, 5), rng)
        padded = [*answered, *[None] * len(gold)]
        best = max(
            sum(box is not None and _counted_iou(box, one) >= 0.1 for box, one in zip(chosen, gold, strict=True))
            for chosen in permutations(padded, len(gold))
        )
        assert matched(answered, gold, 0.1) == best
        free, greedy = list(answered), 0
        for one in gold:
            near = next((box for box in free if iou(box, one) >= 0.1), None)
            if near is not None:
                free.remove(near)
                greedy += 1
        differ_from_greedy += greedy != best
    assert differ_from_greedy


@pytest.mark.parametrize(
    ("response", "gold", "args", "reward"),
    [
        ("[0, 0, 10, 10]", [0, 0, 10, 10], {}, 1.0),
        ("[0, 0, 10, 5]", "[0, 0, 10, 10]", {}, 0.5),
        ('first [0,0,10,10], no: {"bbox_2d": [0, 0, 10, 5]}', [0, 0, 10, 10], {}, 0.5),
        ("[0,0,10,10] [0,0,10,5]", [0, 0, 10, 10], {}, 0.5),  # the last one counts
        ("nothing", [0, 0, 10, 10], {}, 0.0),
        ("[0, 0, 10, 5]", [0, 0, 10, 10], {"threshold": 0.5}, 1.0),
        ("[0, 0, 10, 4]", [0, 0, 10, 10], {"threshold": 0.5}, 0.0),
        ("[0,0,10,10] [0,0,10,10]", [0, 0, 10, 10], {"threshold": 0.5}, 2 / 3),
        ("[0,0,10,10]", [[0, 0, 10, 10], [20, 0, 30, 10], [50, 0, 60, 9]], {"threshold": 0.5}, 0.5),
        ("no", [[0, 0, 10, 10], [20, 0, 30, 10]], {"threshold": 0.5}, 0.0),
    ],
)
def test_boxes_are_graded(response: str, gold: Any, args: dict[str, Any], reward: float) -> None:
    rewards = _rewards("boxes", **args)
    assert rewards.score([_sample(response, gold)]) == [pytest.approx(reward)]
    assert rewards.failures == {}


def test_coordinates_are_brought_together(tmp_path: Path) -> None:
    Image.new("RGB", (280, 56)).save(tmp_path / "abcdef01.png")
    row = {"images": [str(tmp_path / "abcdef01.png")], "width": 1400, "height": 112}
    media = [Media("image", ("abcdef01",), (1, 4, 20), 0, 20)]
    same = {"pixels": "[28, 14, 140, 28]", "thousandths": "[100, 250, 500, 500]", "original": "[140, 28, 700, 56]"}
    for kind, answer in same.items():
        for gold_kind, gold in same.items():
            sample = _sample(answer, gold, **row)
            sample.media = media
            args = {"coordinates": kind, "gold_coordinates": gold_kind}
            assert _rewards("boxes", **args).score([sample]) == [pytest.approx(1.0)]
            if kind != gold_kind:
                assert _rewards("boxes", coordinates=kind).score([sample])[0] < 0.9


@pytest.mark.parametrize(
    ("args", "row", "said"),
    [
        ({"threshold": 0}, None, "threshold is 0; it must be above 0 and at most 1"),
        ({"coordinates": "percent"}, None, "coordinates is 'percent'; it must be pixels, thousandths, original"),
        ({"gold_coordinates": "x"}, None, "gold_coordinates is 'x'; it must be"),
        ({"size_keys": "wh"}, None, "size_keys is 'wh'; it must be two keys"),
        ({"box": 1}, None, "does not take the arguments"),
        ({}, {"answer": [[1, 2, 3, 4], [5, 6, 7, 8]]}, "row train-0 has 2 gold boxes, .*; set threshold"),
        ({}, {"other": 1}, "row train-0 has no key 'answer'"),
        (
            {"gold_coordinates": "original", "coordinates": "thousandths"},
            {"answer": [1, 2, 3, 4], "width": 3},
            r"has 3 and None under width and height \(size_keys\); they must be the original picture's",
        ),
        (
            {"gold_coordinates": "thousandths"},
            {"answer": [1, 2, 3, 4]},
            "row train-0 shows 0 pictures; coordinates in pixels are compared with others in rows that have one picture",
        ),
    ],
)
def test_bad_arguments_and_rows_get_a_sentence(args: dict[str, Any], row: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        _rewards("boxes", **args).check([Prompt("train-0", "g", [1], "p", row or {})])


def test_a_picture_that_is_gone_is_said() -> None:
    sample = _sample("[1, 2, 3, 4]", [1, 2, 3, 4], images=["/nowhere/abcdef01.png"])
    sample.media = [Media("image", ("abcdef01",), (1, 4, 20), 0, 20)]
    with pytest.raises(RewardError, match=r"the picture of row train-0 cannot be read: .*'/nowhere/abcdef01.png'"):
        _rewards("boxes", gold_coordinates="thousandths").score([sample])


def test_gold_without_a_box_is_counted() -> None:
    rewards = _rewards("boxes")
    assert rewards.score([_sample("[1, 2, 3, 4]", "a cat")]) == [0.0]
    assert rewards.failures == {"train-0": 1}


def _table(left: str, right: str) -> int:
    rows = [list(range(len(right) + 1))]
    for place, character in enumerate(left, start=1):
        row = [place]
        for column, other in enumerate(right, start=1):
            changed = rows[-1][column - 1] + (character != other)
            row.append(min(rows[-1][column] + 1, row[-1] + 1, changed))
        rows.append(row)
    return rows[-1][-1]


def test_edit_distance_is_the_textbooks() -> None:
    rng = random.Random(0)
    for letters in ("ab", "abcdefgh", "aé漢😀"):
        for _ in range(300):
            left, right = ("".join(rng.choices(letters, k=rng.randrange(90))) for _ in range(2))
            assert edit_distance(left, right) == _table(left, right)
    assert edit_distance("kitten", "sitting") == 3


@pytest.mark.parametrize(
    ("response", "gold", "reward"),
    [
        ("kitten", "sitting", 1 - 3 / 7),
        ("<think>no</think><answer> a\n b </answer>", "a  b", 1.0),
        ("abc", ["xyz", "abd"], 2 / 3),
        ("A", "a", 0.0),
        ("", "abc", 0.0),
        ("12", 12, 1.0),
    ],
)
def test_read_text_is_graded(response: str, gold: Any, reward: float) -> None:
    assert _rewards("edit_distance").score([_sample(response, gold)]) == [pytest.approx(reward)]


def test_case_may_be_folded_and_gold_without_text_is_counted() -> None:
    assert _rewards("edit_distance", case_sensitive=False).score([_sample("A", "a")]) == [1.0]
    rewards = _rewards("edit_distance")
    assert rewards.score([_sample("a", gold) for gold in ("", None, [], " ")]) == [0.0] * 4
    assert rewards.failures == {"train-0": 4}
    with pytest.raises(RewardError, match="no key 'answer'"):
        rewards.check([Prompt("train-0", "g", [1], "p", {})])


@pytest.mark.parametrize("name", ["math_verify", "exact_number"])
def test_numbers_are_read_between_answer_tags(name: str) -> None:
    responses = ["<think>4 and 5</think><answer> 3 </answer>", "<answer>4</answer>", "<answer>3</answer>"]
    assert _rewards(name).score([_sample(response, "<answer> 3 </answer>") for response in responses]) == [1.0, 0.0, 1.0]


def test_math_verify_reads_the_last_tag_alone() -> None:
    samples = [_sample("<answer>3</answer> Check: $2 + 2 = 4$, so \\boxed{4}", gold) for gold in ("3", "4")]
    assert _rewards("math_verify").score(samples) == [1.0, 0.0]


def test_choices_are_read_between_answer_tags() -> None:
    samples = [
        _sample(f"<think>option A</think><answer>{said}</answer>", "<answer>B</answer>") for said in ("B", "A", "B. 30°")
    ]
    assert _rewards("multiple_choice").score(samples) == [1.0, 0.0, 1.0]
