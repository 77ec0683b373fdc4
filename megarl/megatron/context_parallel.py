"""From the parts of a context-parallel group back to the whole stream's scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _GatherScored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, scored: Tensor, total: int, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.save_for_backward(scored)
        whole = part.new_zeros(total, *part.shape[1:]).index_copy_(0, scored, part)
        torch.distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scored,) = ctx.saved_tensors
        return grads[0][scored], None, None, None


def gather_scored(part: Tensor, scored: Tensor, total: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """All ranks' scores `[N, C]`, N = `total`; this rank's are `part` `[n, C]`, of the scored tokens `scored` (int64 `[n]`).

    Every scored token is one rank's. All ranks compute the same loss of the whole; going backward each takes the gradient
    of its own part, and the sum of the ranks' gradients of a weight is the gradient.
    """
    return part if group.size() == 1 else _GatherScored.apply(part, scored, total, group)
