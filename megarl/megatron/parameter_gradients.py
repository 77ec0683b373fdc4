"""Gradients of the log-prob head's parameters, summed over chunks in float32: in megatron-core's buffers where it has some."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_of_gradients(parameter: Tensor) -> Tensor:
    """The float32 tensor in which a parameter's gradient is summed: megatron-core's own, or a new one."""
    main = main_gradient(parameter)
    return torch.zeros_like(parameter, dtype=torch.float32) if main is None else main


def given_to_autograd(parameter: Tensor, total: Tensor | None, *, overlaps: bool) -> Tensor | None:
    """The gradient that autograd is given where `total` is its sum: none of what is in megatron-core's buffer already, or zeros
    that set off its reduction."""
    if total is None:
        return None
    if total is main_gradient(parameter):
        return torch.zeros_like(parameter) if overlaps else None
    return total.to(parameter.dtype)


def main_gradient(weight: Tensor) -> Tensor | None:
    """The float32 buffer that megatron-core sums gradients of `weight` in, if there is one."""
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    return buffer if buffer is not None and buffer.dtype == torch.float32 else None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """float32 `total` `[V, H]` += `left` `[V, n]` @ `right` `[n, H]`, without a tensor of its size in between.

    A chunk has few rows, so one pass over `[V, H]` takes as long as the product itself.
    """
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.device.type == "cpu":
        total.addmm_(left.float(), right.float())
    else:  # GPUs add bfloat16 products to float32 inside the product
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]
