"""Exchanges between the ranks of a context-parallel group: scores of the whole stream, heads for tokens, and all tokens."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
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


def own_heads_of_all_tokens(heads: Tensor, layout: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """All heads of this rank's tokens, `[S/cp, H, W]`, to this rank's heads of the whole stream in its order, `[S, H/cp, W]`.

    For layers that hand states from token to token: each rank computes some heads from the first token to the last. `layout` is
    that of `StreamShard`; cp divides H.
    """
    for_ranks = heads.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1)
    of_ranks = all_to_all(group, for_ranks)
    return torch.empty_like(of_ranks).index_copy(0, layout.flatten(), of_ranks)


def all_heads_of_own_tokens(heads: Tensor, layout: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """The way back, `[S, H/cp, W]` to `[S/cp, H, W]`."""
    of_ranks = all_to_all(group, heads[layout.flatten()])
    return of_ranks.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


def all_tokens(tokens: Tensor, layout: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """This rank's tokens `[S/cp, ...]` to the whole stream's in its order, `[S, ...]`.

    Going backward a token's gradient is the sum over the ranks, each of which does something else with all of them.
    """
    of_ranks = gather_from_sequence_parallel_region(tokens, tensor_parallel_output_grad=True, group=group)
    return torch.empty_like(of_ranks).index_copy(0, layout.flatten(), of_ranks)
