"""The gated delta rule (arXiv:2412.06464) on plain torch, chunk by chunk; differentiable, on any device.

Each head has a state S `[K, V]`. A token with key k, value v, query q, log decay g and write strength b makes of it
`exp(g) S + k b (v - exp(g) S^T k)^T`, and reads `S^T q`. The writes of a chunk's tokens solve one triangular system.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.options.linear_attention.delta_net import CHUNK

NORM_EPSILON = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention."""


def unit_length(vectors: Tensor) -> Tensor:
    """`[..., K]` over their length; zeros stay zeros."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + NORM_EPSILON)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """What each token reads `[B, T, H, V]`, and the states `[B, H, K, V]` behind the last tokens.

    Args:
        query: `[B, T, H, K]`, scaled as it is to be read with.
        key: `[B, T, H, K]`, of unit length.
        value: `[B, T, H, V]`.
        decay: `[B, T, H]`, at most 0: the log of what is kept of the state.
        strength: `[B, T, H]`, from 0 to 1: how much of the difference to the value is written.
        state: `[B, H, K, V]` before the first tokens.
        chunk: tokens that are computed together; it does not change the result.

    A token with decay and strength 0 leaves the state as it is. All have the same dtype, which is that of the results.
    """
    length = query.shape[1]
    chunk = min(chunk, length)
    query, key, value, decay, strength = (_in_chunks(t, chunk) for t in (query, key, value, decay, strength))
    # In float64, because differences of large sums are wanted. [B, H, N, C]: the log of what is left of the state before.
    exact = decay.double().cumsum(-1)
    between = (exact.unsqueeze(-1) - exact.unsqueeze(-2)).to(decay.dtype)
    total, to_end = exact.to(decay.dtype), (exact[..., -1:] - exact).to(decay.dtype)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()  # [..., i, j]: what token i finds of what token j wrote
    transposed = key.transpose(-1, -2)
    writes = key * strength.unsqueeze(-1)
    system = (writes @ transposed) * between  # its diagonal counts as ones below
    of_values, of_states = torch.linalg.solve_triangular(
        system,
        torch.cat([value * strength.unsqueeze(-1), writes * total.exp().unsqueeze(-1)], dim=-1),
        upper=False,
        unitriangular=True,
    ).split([value.shape[-1], key.shape[-1]], dim=-1)
    reads_writes = (query @ transposed) * between
    reads_state = query * total.exp().unsqueeze(-1)
    until_end = (key * to_end.exp().unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = total[..., -1].exp()[..., None, None]
    outputs = []
    for n in range(query.shape[2]):
        written = of_values[:, :, n] - of_states[:, :, n] @ state
        outputs.append(reads_state[:, :, n] @ state + reads_writes[:, :, n] @ written)
        state = chunk_decay[:, :, n] * state + until_end[:, :, n] @ written
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state


def _in_chunks(tokens: Tensor, chunk: int) -> Tensor:
    """`[B, T, H, ...]` to `[B, H, N, C, ...]`, filled up with zeros."""
    missing = -tokens.shape[1] % chunk
    if missing:
        tokens = torch.cat([tokens, tokens.new_zeros(tokens.shape[0], missing, *tokens.shape[2:])], dim=1)
    return tokens.transpose(1, 2).unflatten(2, (-1, chunk))
