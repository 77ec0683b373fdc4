"""A slice of a flat tensor is stored as boxes that hold its elements, each once and in order."""

from __future__ import annotations

import random

import pytest
import torch

from megarl.megatron.shards import flat_boxes


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 1, 4), (2, 3, 4, 2), (1, 6), ()])
def test_boxes_of_a_slice_hold_its_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    draw = random.Random(0)
    for _ in range(200):
        start, end = sorted(draw.choices(range(whole.numel() + 1), k=2))
        if not shape and end - start != 1:
            continue
        boxes = list(flat_boxes(shape, start, end))
        values = [whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in boxes]
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *values]), torch.arange(start, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
