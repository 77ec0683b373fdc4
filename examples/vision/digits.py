"""Handwritten digits, 1,797 real pictures that come with scikit-learn (`pip install scikit-learn`): rows for `source: python`.

    data:
      train: {source: python, name: "examples/vision/digits.py:digits", args: {split: train}}
      eval: {source: python, name: "examples/vision/digits.py:digits", args: {split: held_out}, limit: 297}
      prompt_key: problem

The last 297 pictures, in scikit-learn's order, are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HELD_OUT = 297


def digits(split: str = "train", size: int = 56, question: str = "Which digit?") -> Iterator[dict[str, Any]]:
    """The rows of `train` or `held_out`: a picture of `size` x `size` pixels under `images`, the `problem` and the `answer`."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split is '{split}'; it must be 'train' or 'held_out'")
    found = load_digits()
    part = slice(None, -HELD_OUT) if split == "train" else slice(-HELD_OUT, None)
    for pixels, label in zip(found.images[part], found.target[part], strict=True):
        grey = Image.fromarray((pixels * (255 / 16)).round().astype(np.uint8))  # 8 x 8, of 0 to 16
        picture = grey.convert("RGB").resize((size, size), Image.Resampling.NEAREST)
        yield {"images": [picture], "problem": f"<image>{question}", "answer": str(label)}
