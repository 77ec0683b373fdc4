"""What Gloo cannot do and megatron asks of NCCL. With torch 2.13 that is one thing: gathering tensors of unequal sizes.
(reduce_scatter_tensor, all_gather_into_tensor, all_to_all_single, AVG, BF16 and coalescing all work.)"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


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


class _Done:
    """The handle of a collective that has already finished."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
