"""The scan of a Mamba-2 layer (arXiv:2405.21060) on plain torch, chunk by chunk; differentiable, on any device.

Each head has a state S `[P, N]`. A token with input x, step d, write direction B and read direction C makes of it
`exp(d a) S + d x B^T`, where a < 0 is the head's rate, and reads `S C`. Heads of a group have the same B and C.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.megatron.running_sums import running_sum
from megarl.options.state_spaces.mamba import CHUNK


def chunked_scan(
    inputs: Tensor, steps: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Reads of each token `[B, T, H, P]`, and the states `[B, H, P, N]` behind the last tokens.

    Args:
        inputs: x `[B, T, H, P]`.
        steps: d `[B, T, H]`, at least 0.
        rates: a `[H]`, below 0.
        writes: B `[B, T, G, N]` of G groups of H / G heads.
        reads: C `[B, T, G, N]`.
        state: `[B, H, P, N]` before the first tokens.
        chunk: tokens that are computed together.

    A token with step 0 leaves the state as it is. All have the same dtype, which is that of the results.
    """
    batch, length, heads, width = inputs.shape
    groups, size = writes.shape[2:]
    chunk = min(chunk, length)
    # In float64, because differences of large sums are wanted. [B, n, G, R, C]: the log of what is left of the state before.
    exact = running_sum(_of_heads(_in_chunks(steps * rates, chunk), groups).double())
    written = _of_heads(_in_chunks(inputs * steps.unsqueeze(-1), chunk), groups)  # [B, n, G, R, C, P]
    writes, reads = (_in_chunks(t, chunk).transpose(2, 3) for t in (writes, reads))  # [B, n, G, C, N]
    total, to_end = exact.to(steps.dtype).exp(), (exact[..., -1:] - exact).to(steps.dtype).exp()
    within = ((reads @ writes.mT).unsqueeze(3) * _KeptShares.apply(exact, steps.dtype)) @ written
    added = (written * to_end.unsqueeze(-1)).mT.flatten(3, 4) @ writes  # [B, n, G, R * P, N]
    added = added.view(batch, -1, heads, width, size)
    kept = total[..., -1].flatten(2)[..., None, None]  # [B, n, H, 1, 1]
    before = []
    for added_by_chunk, kept_by_chunk in zip(added.unbind(1), kept.unbind(1), strict=True):
        before.append(state)
        state = torch.addcmul(added_by_chunk, kept_by_chunk, state)
    carried = torch.stack(before, dim=1).view(batch, -1, groups, heads // groups * width, size)
    carried = (reads @ carried.mT).unflatten(-1, (-1, width)).transpose(3, 4)  # [B, n, G, R, C, P]
    found = within + carried * total.unsqueeze(-1)
    return found.permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, width)[:, :length], state


class _KeptShares(torch.autograd.Function):
    """`[..., C]`, sums of the logs of what each token keeps, to `[..., i, j]`: what token i finds of what token j wrote.

    Keeps its result alone, and computes no gradient of each difference in float64.
    """

    @staticmethod
    def forward(ctx: Any, exact: Tensor, dtype: torch.dtype) -> Tensor:
        kept = (exact.unsqueeze(-1) - exact.unsqueeze(-2)).to(dtype)
        later = torch.ones(kept.shape[-2:], dtype=torch.bool, device=exact.device).triu(1)
        kept = kept.masked_fill_(later, -torch.inf).exp_()
        ctx.save_for_backward(kept)
        return kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [kept] = ctx.saved_tensors
        of_differences = grads[0] * kept
        return (of_differences.sum(-1) - of_differences.sum(-2)).double(), None


def _in_chunks(tokens: Tensor, chunk: int) -> Tensor:
    """`[B, T, ...]` to `[B, n, C, ...]`, filled up with zeros."""
    missing = -tokens.shape[1] % chunk
    if missing:
        tokens = torch.cat([tokens, tokens.new_zeros(tokens.shape[0], missing, *tokens.shape[2:])], dim=1)
    return tokens.unflatten(1, (-1, chunk))


def _of_heads(chunks: Tensor, groups: int) -> Tensor:
    """`[B, n, C, H, ...]` to `[B, n, G, H / G, C, ...]`."""
    return chunks.movedim(2, 3).unflatten(2, (groups, -1))
