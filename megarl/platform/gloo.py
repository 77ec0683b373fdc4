"""Collectives that megatron asks of NCCL and that Gloo cannot do, or does badly. With torch 2.13 it cannot gather
tensors of unequal sizes,
and each of megatron's dozens of groups brings a thread that wakes ninety times a second. Its reduce-scatter sums a copy of all
on every rank: of the gradients of 135M parameters, two ranks on two cores had their halves after 1.6 s; each sending the other
what it needs, they have them after 0.3 s, and sooner where they can read each other's memory.
(reduce_scatter_tensor, all_gather_into_tensor, all_to_all_single, AVG, BF16 and coalescing all work.)"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from megarl.platform.peer_memory import of_peers

LARGE_BYTES = 2**20
"""From here on tensors are exchanged by pairs of ranks; for smaller ones a collective's fewer messages count for more."""
PART_ELEMENTS = 2**20
"""Elements of a summed shard on their way at a time, from each other rank, while the part before is added."""


def all_gather_of_any_sizes(all_gather: Callable) -> Callable:
    """Wrap `torch.distributed.all_gather` so that the outputs may differ in their first dimension, as NCCL allows.

    Equal sizes go straight through. Unequal ones are padded to the longest, gathered, and trimmed into the outputs; every
    rank passes outputs of the same sizes, so every rank takes the same branch.
    """

    @functools.wraps(all_gather)
    def redirected(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        rows = [output.shape[0] if output.dim() else 1 for output in tensor_list]
        if len(set(rows)) <= 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        longest = max(rows)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        all_gather(gathered, padded, group=group)
        for output, source in zip(tensor_list, gathered, strict=True):
            output.copy_(source[: output.shape[0]])
        return _Done() if async_op else None

    return redirected


def reduce_scatter_by_pairs(reduce_scatter: Callable) -> Callable:
    """Wrap `torch.distributed.reduce_scatter_tensor` so that large tensors are summed where they are wanted.

    Every rank receives the others' contributions to its own shard, part by part, and adds them to it in the order of ranks; it
    reads them where they are, if it can.
    """

    @functools.wraps(reduce_scatter)
    def redirected(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or op != distributed.ReduceOp.SUM or not _is_large(input, output):
            return reduce_scatter(output, input, op=op, group=group, async_op=async_op)
        group = group or distributed.group.WORLD
        shards, total = input.view(group.size(), -1), output.view(-1)
        if total.data_ptr() != shards[group.rank()].data_ptr():
            total.copy_(shards[group.rank()])
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        if (peer_shards := of_peers(shards, group)) is not None:
            distributed.barrier(group)  # the peers' shards are whole
            for rank in others:
                total.add_(peer_shards[rank][group.rank()])
            distributed.barrier(group)  # this rank's shards were read
            return None
        parts = [slice(start, start + PART_ELEMENTS) for start in range(0, len(total), PART_ELEMENTS)]
        buffers = torch.empty(2, len(others), min(PART_ELEMENTS, len(total)), dtype=input.dtype)

        def exchange(number: int) -> tuple[list[torch.Tensor], list[Any]]:
            """The others' contributions to a part, and what must be waited for until they are there."""
            part = parts[number]
            came = [one[: len(total[part])] for one in buffers[number % 2]]
            under_way = [distributed.irecv(one, group_src=rank, group=group) for one, rank in zip(came, others, strict=True)]
            return came, under_way + [distributed.isend(shards[rank, part], group_dst=rank, group=group) for rank in others]

        following = exchange(0)
        for number, part in enumerate(parts):
            came, under_way = following
            if number + 1 < len(parts):
                following = exchange(number + 1)
            for one in under_way:
                one.wait()
            for one in came:
                total[part].add_(one)
        return None

    return redirected


def all_gather_by_pairs(all_gather: Callable) -> Callable:
    """Wrap `torch.distributed.all_gather_into_tensor` so that large tensors go straight to where they are wanted."""

    @functools.wraps(all_gather)
    def redirected(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or not _is_large(output_tensor, input_tensor):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        group = group or distributed.group.WORLD
        shards, local = output_tensor.view(group.size(), -1), input_tensor.view(-1)
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        if (peer_shards := of_peers(shards, group)) is not None:
            if local.data_ptr() != shards[group.rank()].data_ptr():
                shards[group.rank()].copy_(local)
            distributed.barrier(group)  # the peers' shards are there
            for rank in others:
                shards[rank].copy_(peer_shards[rank][rank])
            distributed.barrier(group)  # this rank's shard was read
            return None
        under_way: list[Any] = [distributed.irecv(shards[rank], group_src=rank, group=group) for rank in others]
        under_way += [distributed.isend(local, group_dst=rank, group=group) for rank in others]
        if local.data_ptr() != shards[group.rank()].data_ptr():
            shards[group.rank()].copy_(local)
        for request in under_way:
            request.wait()
        return None

    return redirected


def _is_large(whole: torch.Tensor, shard: torch.Tensor) -> bool:
    return whole.nbytes >= LARGE_BYTES and whole.is_contiguous() and shard.is_contiguous()


def on_one_device(init: Callable) -> Callable:
    """Wrap `ProcessGroupGloo.__init__` so that all groups of the process share one device, that is one polling thread."""

    @functools.wraps(init)
    def redirected(self: Any, store: Any, rank: int, size: int, options: Any = None, timeout: timedelta | None = None) -> None:
        if options is None:
            options = type(self)._Options()
            options._devices = [_device()]
            if timeout is not None:
                options._timeout = timeout
        init(self, store, rank, size, options)

    return redirected


@functools.cache
def _device() -> Any:
    gloo = torch.distributed.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


class _Done:
    """The handle of a collective that has already finished."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
