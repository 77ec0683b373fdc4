"""A walk on a grid that is shown as a picture after every move: an environment of several turns, and its rows.

    data:
      train: {source: python, name: "examples/vision/walk.py:walks", args: {last: 56}}
      eval: {source: python, name: "examples/vision/walk.py:walks", args: {first: 56}}
    rollout:
      episode: {kind: environment, tools: ["examples/vision/walk.py:Walk"], max_turns: 4}
    rewards: [{name: environment}]

The policy sees the walker (a blue circle) and the goal (a green square), and says a digit: 1 left, 2 right, 3 up, 4 down.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from PIL import Image, ImageDraw

SIDE, CELL = 3, 28
MOVES = {"1": (-1, 0), "2": (1, 0), "3": (0, -1), "4": (0, 1)}
QUESTION = "Which digit?"


def walks(first: int = 0, last: int = 72) -> Iterator[dict[str, Any]]:
    """The walks from number `first` to before `last` of all 72, which are in one mixed order: the picture that each begins with
    and its question, the `walker` and the `goal` as [column, row]."""
    starts = list(permutations(range(SIDE**2), 2))
    random.Random(0).shuffle(starts)
    for places in starts[first:last]:
        walker, goal = ([place % SIDE, place // SIDE] for place in places)
        yield {"question": f"<image>{QUESTION}", "images": [draw(walker, goal)], "walker": walker, "goal": goal}


class Walk:
    """One walk. A move that leaves the grid, or is no move, changes nothing.

    A move is rewarded by how much nearer it came, as a share of the whole way: a walk that reaches the goal is worth 1.
    """

    def reset(self, prompt: Any) -> None:
        """A walk begins as its row shows it."""
        self.walker, self.goal = list(prompt.row["walker"]), list(prompt.row["goal"])
        self.way = self.left()

    def step(self, text: str) -> tuple[dict[str, Any], float, bool]:
        """What is seen after the move that `text` names, its reward, and whether the goal is reached."""
        before = self.left()
        move = MOVES.get(text.strip(), (0, 0))
        self.walker = [min(max(place + by, 0), SIDE - 1) for place, by in zip(self.walker, move, strict=True)]
        seen = {"text": f"<image>{QUESTION}", "image": draw(self.walker, self.goal)}
        return seen, (before - self.left()) / self.way, self.walker == self.goal

    def left(self) -> int:
        """Moves from the walker to the goal."""
        return sum(abs(one - other) for one, other in zip(self.walker, self.goal, strict=True))


def draw(walker: list[int], goal: list[int]) -> Image.Image:
    """The grid, white, 84 x 84 pixels."""
    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    pen = ImageDraw.Draw(image)
    for (column, row), shape, colour in ((goal, pen.rectangle, (30, 160, 60)), (walker, pen.ellipse, (40, 80, 220))):
        left, top = column * CELL, row * CELL
        shape((left + 4, top + 4, left + CELL - 5, top + CELL - 5), fill=colour)
    return image
