"""Attention of one new token per request over a paged cache, many requests in one call. Pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Gather:
    """Requests of similar length that are attended to in one call.

    `rows` [R] are their places in the batch, `slots` [R, L] the cache slots of their tokens (L: the longest of them), `mask`
    [R, 1, 1, L] is true where a slot holds a token of the request.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


def gathers(req_to_token: torch.Tensor, request_rows: torch.Tensor, lengths: torch.Tensor) -> list[Gather]:
    """Groups of requests, padded to less than twice their shortest; `request_rows` [B] of the table have `lengths` [B]."""
    groups = []
    powers = lengths.double().log2().floor()
    for power in powers.unique():
        rows = (powers == power).nonzero()[:, 0]
        longest = int(lengths[rows].max())
        mask = torch.arange(longest)[None, :] < lengths[rows][:, None]
        # what lies beyond a request's length in the table is another's; slot 0 is SGLang's padding slot
        slots = torch.where(mask, req_to_token[request_rows[rows], :longest].long(), 0)
        groups.append(Gather(rows, slots, mask[:, None, None, :]))
    return groups


def attend_with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of the last N of a request's L tokens: query [N, Hq, D], keys [L, Hkv, D]; returns [N, Hq, Dv].

    The score of one more key, whose value is zero, is the head's sink [Hq] (gpt-oss). A token attends to `window` before it.
    """
    new, length, group = len(query), len(keys), query.shape[1] // keys.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    spread = keys.to(query.dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", query, spread) * scale
    at = torch.arange(length)
    behind = at[length - new :, None] - at
    hidden = (behind < 0) | (behind > (length if window is None else window))
    scores = scores.masked_fill(hidden, -torch.inf)
    of_sinks = sinks.to(scores.dtype)[:, None, None].expand(-1, new, 1)
    weights = torch.cat([scores, of_sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("hnl,lhd->nhd", weights, values.to(query.dtype).repeat_interleave(group, dim=1))


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: list[Gather], scale: float | None
) -> torch.Tensor:
    """Attention of one new token per request: query [B, Hq, D], caches [slots, Hkv, D]; returns [B, Hq, Dv].

    Query heads that share a key head are attended to as if they were positions, so that keys are gathered once.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    output = query.new_empty(len(query), heads, values.shape[-1])
    for part in group:
        shared = query[part.rows].view(len(part.rows), kv_heads, heads // kv_heads, -1)
        result = scaled_dot_product_attention(
            shared,
            _rows(keys, part.slots).transpose(1, 2).to(query.dtype),
            _rows(values, part.slots).transpose(1, 2).to(query.dtype),
            attn_mask=part.mask,
            scale=scale,
        )
        output[part.rows] = result.reshape(len(part.rows), heads, -1)
    return output


def _rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`cache[slots]`, by whole rows: four times as fast as an index."""
    return cache.index_select(0, slots.flatten()).unflatten(0, slots.shape)
