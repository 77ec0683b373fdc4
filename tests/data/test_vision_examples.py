"""The example sources of pictures: an answer says what the picture shows, rows follow from their seed, splits do not meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import load_any
from megarl.config.sources import SourceConfig
from megarl.data.prompts import load_rows
from megarl.data.sample import Sample
from megarl.rewards import build_rewards

RECIPES = Path(__file__).parents[2] / "examples/vision"


def _shapes(**args: Any) -> list[dict[str, Any]]:
    return load_rows(SourceConfig(source="python", name="examples/vision/shapes.py:count_shapes", args=args))


def _regions(picture: Any) -> int:
    """Connected regions (side by side or corner to corner) of what is not white."""
    left = {(int(y), int(x)) for y, x in np.argwhere((np.asarray(picture) != 255).any(axis=2))}
    count = 0
    while left:
        count += 1
        open_points = [left.pop()]
        while open_points:
            y, x = open_points.pop()
            near = {(y + down, x + right) for down in (-1, 0, 1) for right in (-1, 0, 1)} & left
            left -= near
            open_points += near
    return count


def test_an_answer_is_the_number_of_shapes() -> None:
    rows = _shapes(rows=60) + _shapes(rows=5, most=9, size=56)
    assert [int(row["answer"]) for row in rows] == [_regions(row["images"][0]) for row in rows]
    assert {row["answer"] for row in rows[:60]} == set("12345")
    assert rows[0]["problem"] == "<image>How many shapes?"
    assert rows[-1]["images"][0].size == (56, 56)


def test_a_row_of_shapes_follows_from_its_seed() -> None:
    first, again, later = _shapes(rows=6), _shapes(rows=6), _shapes(rows=3, seed=3)
    assert [row["images"][0].tobytes() for row in first] == [row["images"][0].tobytes() for row in again]
    assert [row["images"][0].tobytes() for row in first[3:]] == [row["images"][0].tobytes() for row in later]
    assert len({row["images"][0].tobytes() for row in first}) == 6


def test_digits_are_split_and_whole() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    name = "examples/vision/digits.py:digits"
    train, held_out = (
        load_rows(SourceConfig(source="python", name=name, args={"split": split})) for split in ("train", "held_out")
    )
    found = datasets.load_digits()
    assert (len(train), len(held_out)) == (1500, 297)
    assert [int(row["answer"]) for row in train + held_out] == found.target.tolist()
    assert train[0]["images"][0].size == (56, 56)
    shown = np.asarray(held_out[-1]["images"][0])[3::7, 3::7, 0]  # the middle of each of the 8 x 8 squares
    np.testing.assert_array_equal(shown, np.round(found.images[-1] * 255 / 16))


def test_an_instruction_stands_behind_each_prompt(tmp_path: Path) -> None:
    lines = [{"problem": "<image>How many?", "answer": "3"}, {"problem": "Which?", "answer": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "instruction": "Think."}
    name = "examples/vision/instructed.py:instructed"
    rows = load_rows(SourceConfig(source="python", name=name, args=args))
    assert rows == [line | {"problem": f"{line['problem']} Think."} for line in lines]


@pytest.mark.parametrize(
    ("recipe", "gold", "rewards"),
    [
        (
            "r1v_counting",
            "<answer> 3 </answer>",
            {"<think>a\n</think> <answer> 3 </answer>": 2, "<answer>3</answer>": 1, "4": 0},
        ),
        (
            "geometry3k",
            "\\frac{3}{2}",
            {"<think>\n2</think> so \\boxed{\\frac{3}{2}}.": 1, "\\boxed{1.5}": 0.9, "<think></think>\\boxed{2}": 0.1},
        ),
        (
            "lmm_r1",
            "$\\boxed{60}$",
            {
                "<think>a\n</think><answer>It is $\\boxed{60}$</answer>": 1.5,
                "<think>a</think> <answer>$60$</answer>": 1,
                "<think>a</think><think>b</think><answer>$61$</answer>": 0,
            },
        ),
        ("open_r1_video", "<answer>B</answer>", {"<think>A</think><answer>B. cats</answer>": 1, "<answer>A</answer>": 0}),
        ("r1_onevision_grpo", "12", {"<think>a</think><answer>12</answer>": 2, "<think>a</think><answer>13</answer>": 1}),
    ],
)
def test_recipes_reward_what_the_published_ones_do(recipe: str, gold: str, rewards: dict[str, float]) -> None:
    config: Any = load_any(RECIPES / f"{recipe}.yaml")
    row = {config.data.answer_key: gold}
    samples = [Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text=text, row=row) for text in rewards]
    sources = build_rewards(config.rewards, config.data)
    assert sources.score(samples) == pytest.approx(list(rewards.values()))
    assert sources.failures == {}
