"""Pictures of one to five shapes, to be counted: rows that need no download, for `source: python`.

    data:
      train: {source: python, name: "examples/vision/shapes.py:count_shapes", args: {rows: 2000, seed: 0}}
      eval: {source: python, name: "examples/vision/shapes.py:count_shapes", args: {rows: 200, seed: 1000000}, limit: 200}
      prompt_key: problem

Row i depends on `seed` + i alone, so ranges of seeds that do not meet share no row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "orange": (240, 150, 20),
    "purple": (140, 60, 170),
}


def count_shapes(
    rows: int = 1000, seed: int = 0, size: int = 84, most: int = 5, question: str = "How many shapes?"
) -> Iterator[dict[str, Any]]:
    """`rows` rows with a picture of `size` x `size` pixels under `images`, the `problem` with its mark, and the `answer`."""
    for row in range(rows):
        chance = random.Random(seed + row)
        count = chance.randint(1, most)
        yield {"images": [draw(count, size, chance)], "problem": f"<image>{question}", "answer": str(count)}


def draw(count: int, size: int, chance: random.Random) -> Image.Image:
    """A white picture with `count` shapes, none of which touches another: each has a cell of a 3 x 3 grid (so at most 9)."""
    image = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(image)
    cell = size // 3
    for place in chance.sample(range(9), count):
        radius = chance.randint(cell // 4, cell // 2 - 2)
        slack = cell // 2 - 1 - radius
        x = place % 3 * cell + cell // 2 + chance.randint(-slack, slack)
        y = place // 3 * cell + cell // 2 + chance.randint(-slack, slack)
        colour = COLOURS[chance.choice(sorted(COLOURS))]
        shape = chance.choice(SHAPES)
        if shape == "triangle":
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
        else:
            outline = pen.ellipse if shape == "circle" else pen.rectangle
            outline((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return image
