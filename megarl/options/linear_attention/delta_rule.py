"""The gated delta rule (arXiv:2412.06464) on plain torch, chunk by chunk; differentiable, on any device.

Each head has a state S `[K, V]`. A token with key k, value v, query q, log decay g and write strength b makes of it
`D S + k b (v - (D S)^T k)^T` with D = exp(g), and reads `S^T q`. Kimi's delta attention (arXiv:2510.26692) has a decay for each
channel of the keys: there D is diagonal. The writes of a chunk's tokens solve one triangular system.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.megatron.running_sums import running_sum
from megarl.options.linear_attention.delta_net import BLOCK, CHUNK

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
        decay: `[B, T, H]`, or `[B, T, H, K]` with one for each channel, at most 0: the log of what is kept of the state.
        strength: `[B, T, H]`, from 0 to 2: how much of the difference to the value is written.
        state: `[B, H, K, V]` before the first tokens.
        chunk: tokens that are computed together, a multiple of `BLOCK` or less than it; it does not change the result.

    A token with decay and strength 0 leaves the state as it is. All have the same dtype, which is that of the results.
    """
    length, by_channel = query.shape[1], decay.dim() == key.dim()
    if by_channel:
        chunk = min(chunk, -(-length // min(BLOCK, chunk)) * min(BLOCK, chunk))
    else:
        chunk, decay = min(chunk, length), decay.unsqueeze(-1)
    query, key, value, decay, strength = (_in_chunks(t, chunk) for t in (query, key, value, decay, strength))
    # In float64, because differences of large sums are wanted. [B, H, N, C, K or 1]: the log of what is left of the state.
    exact = running_sum(decay.double().mT).mT
    total, to_end = exact.to(decay.dtype).exp(), (exact[..., -1:, :] - exact).to(decay.dtype).exp()
    writes = key * strength.unsqueeze(-1)
    found = _found_by_channel if by_channel else _found
    system, reads_writes = found((writes, query), key, exact)  # the diagonal of the system counts as ones below
    of_values, of_states = torch.linalg.solve_triangular(
        system, torch.cat([value * strength.unsqueeze(-1), writes * total], dim=-1), upper=False, unitriangular=True
    ).split([value.shape[-1], key.shape[-1]], dim=-1)
    reads_state, until_end = query * total, (key * to_end).transpose(-1, -2)
    chunk_decay = total[..., -1, :].unsqueeze(-1)
    outputs = []
    for n in range(query.shape[2]):
        written = of_values[:, :, n] - of_states[:, :, n] @ state
        outputs.append(reads_state[:, :, n] @ state + reads_writes[:, :, n] @ written)
        state = chunk_decay[:, :, n] * state + until_end[:, :, n] @ written
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state


def _found(by: tuple[Tensor, ...], key: Tensor, exact: Tensor) -> list[Tensor]:
    """For each of `by`, vectors of a chunk's tokens `[..., C, K]`: how much of what token j wrote under its key token i finds.

    `[..., i, j]`, 0 where j comes later. `exact` `[..., C, 1]` is the sum of log decays up to each token.
    """
    between = (exact - exact.transpose(-1, -2)).to(key.dtype).masked_fill(_later(key), -torch.inf).exp()
    transposed = key.transpose(-1, -2)
    return [(vectors @ transposed) * between for vectors in by]


def _found_by_channel(by: tuple[Tensor, ...], key: Tensor, exact: Tensor) -> list[Tensor]:
    """The same with a decay for each channel, `exact` `[..., C, K]`.

    Only the tokens of one block have each pair's decays computed, `[..., b, b, K]`. From a token of an earlier block they are a
    product: to the start of the later one's block and from there on, neither of which is more than 1.
    """
    block, dtype = min(BLOCK, key.shape[-2]), key.dtype
    inside = exact.unflatten(-2, (-1, block))  # [..., R, b, K]
    before = torch.cat([torch.zeros_like(inside[..., :1, 0, :]), inside[..., :-1, -1, :]], dim=-2)  # [..., R, K]
    tokens = torch.arange(key.shape[-2], device=key.device)
    not_before = tokens >= torch.arange(before.shape[-2], device=key.device)[:, None] * block  # [R, C]
    to_start = (before.unsqueeze(-2) - exact.unsqueeze(-3)).to(dtype).masked_fill(not_before.unsqueeze(-1), -torch.inf).exp()
    far_keys = (key.unsqueeze(-3) * to_start).transpose(-1, -2)  # [..., R, K, C]
    from_start = (inside - before.unsqueeze(-2)).to(dtype).exp()
    later = _later(inside).unsqueeze(-1)
    near = (inside.unsqueeze(-2) - inside.unsqueeze(-3)).to(dtype).masked_fill(later, -torch.inf).exp()  # [..., R, i, j, K]
    near_keys = (key.unflatten(-2, (-1, block)).unsqueeze(-3) * near).transpose(-1, -2)
    found = []
    for vectors in by:
        in_blocks = vectors.unflatten(-2, (-1, block))
        of_earlier = (in_blocks * from_start) @ far_keys  # [..., R, b, C]
        of_block = (in_blocks.unsqueeze(-2) @ near_keys).squeeze(-2)  # [..., R, b, b]
        on_diagonal = torch.diag_embed(of_block.movedim(-3, -1), dim1=-4, dim2=-2)  # [..., R, b, R, b]
        found.append(of_earlier.flatten(-3, -2) + on_diagonal.flatten(-2).flatten(-3, -2))
    return found


def _later(tokens: Tensor) -> Tensor:
    """Of tokens `[..., C, K]` whether j comes after i, `[i, j]`."""
    return torch.ones(tokens.shape[-2], tokens.shape[-2], dtype=torch.bool, device=tokens.device).triu(1)


def _in_chunks(tokens: Tensor, chunk: int) -> Tensor:
    """`[B, T, H, ...]` to `[B, H, N, C, ...]`, filled up with zeros."""
    missing = -tokens.shape[1] % chunk
    if missing:
        tokens = torch.cat([tokens, tokens.new_zeros(tokens.shape[0], missing, *tokens.shape[2:])], dim=1)
    return tokens.transpose(1, 2).unflatten(2, (-1, chunk))
