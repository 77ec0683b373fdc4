"""Parameters that megatron-core's checkpoints store in several tensors: the projections of layers with states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


def in_sections(whole: ShardedTensor, rows: Mapping[str, int]) -> ShardedTensorFactory:
    """A parameter stored as several tensors: so many of this rank's rows, in this order, under the key and each name."""
    described = whole.without_data()

    @torch.no_grad()
    def build(key: str, data: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        stored = replace(described, data=data, dtype=data.dtype, replica_id=replica_id)
        parts, start = [], 0
        for name, count in rows.items():
            [part] = stored.narrow(0, start, count)
            parts.append(replace(part, key=f"{key}.{name}"))
            start += count
        return parts

    return ShardedTensorFactory(whole.key, whole.data, build, torch.no_grad()(torch.cat), whole.replica_id)
