"""The way from the rows of a batch that this data-parallel replica holds to those of the others, by torch.distributed."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor

from megarl.algorithms import Shard


def shard_of_replica(rows: Tensor, device: torch.device) -> Shard:
    """The shard with these `rows` of the batch, int64 `[b]`; the rows of all replicas together are all rows of the batch.

    Collective over the ranks that report for their replicas.
    """
    group = parallel_state.get_data_parallel_group()
    replicas = torch.distributed.get_world_size(group)
    mine = torch.tensor([len(rows)], device=device)
    every = [torch.empty_like(mine) for _ in range(replicas)]
    torch.distributed.all_gather(every, mine, group=group)
    counts = torch.cat(every).tolist()

    def gathered(x: Tensor) -> Tensor:
        kind = x.dtype
        sent = torch.zeros(max(counts), *x.shape[1:], dtype=torch.uint8 if kind == torch.bool else kind, device=device)
        sent[: len(x)] = x
        received = [torch.empty_like(sent) for _ in range(replicas)]
        torch.distributed.all_gather(received, sent, group=group)
        return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)]).to("cpu", kind)

    order = gathered(rows).argsort()

    def total(x: Tensor) -> Tensor:
        summed = x.to(device, copy=True)
        torch.distributed.all_reduce(summed, group=group)
        return summed.cpu()

    return Shard(rows=lambda x: gathered(x)[order], own=lambda x: x[rows], total=total)
