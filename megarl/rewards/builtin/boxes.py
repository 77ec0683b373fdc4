"""`boxes`: how well the boxes that an answer gives agree with the gold ones (grounding).

Of one gold box the intersection over union (IoU) with the last box answered; with a `threshold`, the F1 of boxes that are
matched one to one at that IoU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image

from megarl.data.final_answer import Box, read_boxes
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.scorer import Verdict, Verifier

Coordinates = Literal["pixels", "thousandths", "original"]
"""`pixels` of the picture as the model sees it, `thousandths` of its sides, pixels of the `original` that was resized."""


class Boxes(Verifier):
    """The verifier over rows whose gold answer is one box `[x1, y1, x2, y2]`, a list of them, or a text that gives them."""

    name = "boxes"

    def __init__(
        self,
        answer_key: str,
        *,
        threshold: float | None = None,
        coordinates: Coordinates = "pixels",
        gold_coordinates: Coordinates | None = None,
        size_keys: Sequence[str] = ("width", "height"),
    ) -> None:
        """Args:
            answer_key: key of the gold answer in a row.
            threshold: the IoU from which two boxes are the same; None: the reward is the IoU, and a row has one gold box.
            coordinates: what the numbers of an answer are.
            gold_coordinates: what those of the gold answer are; None: the same.
            size_keys: keys of a row that hold width and height of the original picture, read for `original` alone.

        Raises:
            RewardError: an argument is none of what it may be.
        """
        if threshold is not None and not 0 < threshold <= 1:
            raise self.error(f"threshold is {threshold}; it must be above 0 and at most 1")
        self.answered, self.in_gold = coordinates, gold_coordinates or coordinates
        for name, value in (("coordinates", self.answered), ("gold_coordinates", self.in_gold)):
            if value not in get_args(Coordinates):
                raise self.error(f"{name} is '{value}'; it must be {', '.join(get_args(Coordinates))}")
        if isinstance(size_keys, str) or len(size_keys) != 2:
            raise self.error(f"size_keys is {size_keys!r}; it must be two keys, of the width and of the height")
        super().__init__(answer_key)
        self.threshold, self.size_keys = threshold, tuple(size_keys)

    def check(self, prompt: Prompt) -> None:
        """Refuse a row without a gold answer, with several gold boxes and no threshold, or without a size that is needed."""
        gold = read_boxes(self.gold(prompt))
        if len(gold) > 1 and self.threshold is None:
            raise self.error(f"row {prompt.row_id} has {len(gold)} gold boxes, which are matched at an IoU; set threshold")
        self._sides(prompt)

    def judge(self, sample: Sample) -> Verdict:
        """From 0 to 1, or None where the gold answer has no box."""
        (across, down), (gold_across, gold_down) = self._sides(sample)
        gold = [_scaled(box, gold_across, gold_down) for box in read_boxes(self.gold(sample))]
        answered = [_scaled(box, across, down) for box in read_boxes(sample.response_text)]
        if not gold:
            return None
        if self.threshold is None:
            return iou(answered[-1], gold[0]) if answered else 0.0
        return 2 * matched(answered, gold, self.threshold) / (len(answered) + len(gold))

    def _sides(self, of: Sample | Prompt) -> tuple[tuple[float, float], tuple[float, float]]:
        """Width and height that the numbers of the answer, and of the gold answer, are divided by."""
        if self.answered == self.in_gold:
            return (1.0, 1.0), (1.0, 1.0)
        return self._side(self.answered, of), self._side(self.in_gold, of)

    def _side(self, kind: Coordinates, of: Sample | Prompt) -> tuple[float, float]:
        if kind == "thousandths":
            return 1000.0, 1000.0
        if kind == "pixels":
            try:
                with Image.open(_kept_file(of), formats=["PNG"]) as picture:
                    return float(picture.width), float(picture.height)
            except OSError as error:
                raise self.error(f"the picture of row {of.row_id} cannot be read: {error}") from error
        sides = [of.row.get(key) for key in self.size_keys]
        if not all(isinstance(side, int | float) and side > 0 for side in sides):
            raise self.error(
                f"row {of.row_id} has {sides[0]!r} and {sides[1]!r} under {' and '.join(self.size_keys)} "
                "(size_keys); they must be the original picture's width and height in pixels"
            )
        return float(sides[0]), float(sides[1])  # type: ignore[arg-type]


def iou(left: Box, right: Box) -> float:
    """Area that two boxes share over the area that they cover together, 0 to 1; a box whose corners are swapped covers none."""
    areas = [max(x2 - x1, 0.0) * max(y2 - y1, 0.0) for x1, y1, x2, y2 in (left, right)]
    across = min(left[2], right[2]) - max(left[0], right[0])
    down = min(left[3], right[3]) - max(left[1], right[1])
    shared = max(across, 0.0) * max(down, 0.0)
    return shared / (sum(areas) - shared) if shared else 0.0


def matched(answered: Sequence[Box], gold: Sequence[Box], threshold: float) -> int:
    """The most pairs of an answered and a gold box with an IoU of `threshold` or more, each box in one pair."""
    near = [[index for index, box in enumerate(answered) if iou(box, one) >= threshold] for one in gold]
    partner: dict[int, int] = {}

    def find(one: int, tried: set[int]) -> bool:
        for index in near[one]:
            if index not in tried:
                tried.add(index)
                if index not in partner or find(partner[index], tried):
                    partner[index] = one
                    return True
        return False

    return sum(find(one, set()) for one in range(len(gold)))


def _scaled(box: Box, across: float, down: float) -> Box:
    return box[0] / across, box[1] / down, box[2] / across, box[3] / down


def _kept_file(of: Sample | Prompt) -> Path:
    """The file of the row's only picture, at the size that the model sees."""
    if len(of.media) == 1 and of.media[0].kind == "image":
        name = f"{of.media[0].digests[0]}.png"
        for text in _texts(of.row):
            if text.endswith(name):
                return Path(text)
    raise RewardError(
        f"reward 'boxes': row {of.row_id} shows {len(of.media)} pictures; coordinates in pixels are compared with others in "
        "rows that have one picture, under data.image_key"
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
