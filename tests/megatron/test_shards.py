"""A slice of a flat tensor is stored as boxes that hold its elements, each once and in order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.dist_writer import write_shards
from megarl.megatron import shards as shards_module
from megarl.megatron.shards import ShardBox, Shards, flat_boxes


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


def test_a_copy_pins_little_more_than_it_holds_and_is_written_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes lie in several blocks where they must; torch pins each block as the next power of two."""
    from megarl.megatron import host_memory

    pinned: list[int] = []

    def recorded(nbytes: int, device_type: str) -> torch.Tensor:
        pinned.append(1 << (nbytes - 1).bit_length())
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "allocate", recorded)
    monkeypatch.setattr(host_memory, "LARGEST_BLOCK", 1024)
    monkeypatch.setattr(host_memory, "SMALLEST_BLOCK", 64)
    values = [
        torch.randn(size, dtype=dtype) for size, dtype in ((700, torch.float32), (3, torch.bfloat16), (90, torch.float64))
    ]
    boxes = [ShardBox(f"t{at}", tuple(flat.shape), (0,), tuple(flat.shape), flat) for at, flat in enumerate(values)]
    shards = Shards(0, boxes, {"name/shard_0_1": b"123"}, None)
    copy = shards.copied_into(shards_module.host_memory(shards.nbytes))
    assert shards.nbytes <= sum(pinned) < shards.nbytes + 64
    assert len(copy.boxes[0].rest) == 2
    expected = write_shards(shards, tmp_path / "as it is")
    for flat in values:
        flat.zero_()
    assert write_shards(copy, tmp_path / "copied").keys == expected.keys
    name = "__0_0.distcp"
    assert (tmp_path / "copied" / name).read_bytes() == (tmp_path / "as it is" / name).read_bytes()
