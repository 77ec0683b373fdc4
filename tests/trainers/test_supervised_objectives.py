"""What the losses of given responses read of a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megarl.trainers.supervised.objectives import sides


def test_sides_of_a_pair_are_found_in_whatever_order_they_come() -> None:
    pair, is_chosen = [70_001.0, 3.0, 70_000.0, 3.0, 70_001.0, 70_000.0], [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    lengths = torch.tensor([2, 1, 3, 1, 2, 4])
    columns = {"pair": pair, "is_chosen": is_chosen}
    stream: Any = SimpleNamespace(
        lengths=lengths, columns={name: torch.tensor(values).repeat_interleave(lengths) for name, values in columns.items()}
    )
    chosen, rejected = sides(stream)
    assert chosen.tolist() == [1, 2, 4]
    assert rejected.tolist() == [3, 5, 0]
