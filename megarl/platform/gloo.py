"""What Gloo cannot do, or does badly, and megatron asks of NCCL. With torch 2.13 it cannot gather tensors of unequal sizes,
and each of megatron's dozens of groups brings a thread that wakes ninety times a second.
(reduce_scatter_tensor, all_gather_into_tensor, all_to_all_single, AVG, BF16 and coalescing all work.)"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
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
