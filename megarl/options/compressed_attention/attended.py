"""Attention in blocks of queries, with gradients that make the scores anew: nothing is kept for each pair of tokens.

The heads' rows of a block are one product with the keys that they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.options.compressed_attention.windows import BlockCall


class BlocksPart(NamedTuple):
    """Some blocks of a call: their queries `[B, R * h, d]`, all keys that they may see `[B, C + K, d]`, the shares that heads
    take of each `[B, R * h, C + K]`, and of their sinks `[B, R, h]`."""

    blocks: BlockCall
    at: slice
    query: Tensor
    keys: Tensor
    shares: Tensor
    of_sinks: Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    compressed: Tensor,
    sinks: Tensor,
    choices: Tensor | None,
    calls: tuple[BlockCall, ...],
    how: tuple[int, int, float],
) -> Tensor:
    """`[n, h, d]` from `query` `[n, h, d]`, `keys` `[N, d]` and `compressed` `[E, d]`, which are the values too; zero of tokens
    in no segment.

    A query sees the last tokens of the window and the compressed keys of its sequence, or those of `choices` `[n, k]`, which
    are numbers of windows. `how`: the window, the rate, and the scale of scores.
    """
    found: Tensor = _Attend.apply(query, keys, compressed, sinks, choices, calls, how)
    return found


class _Attend(torch.autograd.Function):
    """Keeps its arguments alone."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, keys, compressed, sinks, choices, calls, how = given
        ctx.save_for_backward(query, keys, compressed, sinks, choices)
        ctx.calls, ctx.how = calls, how
        result: Tensor = torch.zeros_like(query)
        for call in calls:
            of_call = query.new_empty(*call.queries.shape, *query.shape[1:])
            for part in _parts(query, keys, compressed, sinks, choices, call, how):
                of_call[part.at] = (part.shares.to(query.dtype) @ part.keys).view(of_call[part.at].shape)
            result[call.target] = of_call.flatten(0, 1)[call.source]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, compressed, sinks, choices = ctx.saved_tensors
        of_query, of_keys, of_compressed = (torch.zeros_like(values) for values in (query, keys, compressed))
        of_sinks = torch.zeros_like(sinks, dtype=torch.promote_types(sinks.dtype, torch.float32))
        for call in ctx.calls:
            asked = grads[0].new_zeros(call.queries.numel(), *query.shape[1:])
            asked[call.source] = grads[0][call.target]
            asked = asked.unflatten(0, call.queries.shape)
            of_call = query.new_empty(asked.shape)
            for part in _parts(query, keys, compressed, sinks, choices, call, ctx.how):
                grad = asked[part.at].flatten(1, 2)
                of_shares = (grad @ part.keys.mT).to(part.shares.dtype)
                along = (part.shares * of_shares).sum(-1, keepdim=True)
                of_sinks -= (part.of_sinks * along.view(part.of_sinks.shape)).sum((0, 1))
                of_scores = (part.shares * (of_shares - along) * ctx.how[2]).to(query.dtype)
                of_call[part.at] = (of_scores @ part.keys).view(of_call[part.at].shape)
                of_both = part.shares.to(grad.dtype).mT @ grad + of_scores.mT @ part.query
                tokens = part.blocks.tokens.shape[1]
                of_keys.index_add_(0, part.blocks.tokens.flatten(), of_both[:, :tokens].flatten(0, 1))
                of_compressed.index_add_(0, part.blocks.compressed.flatten(), of_both[:, tokens:].flatten(0, 1))
            of_query[call.target] = of_call.flatten(0, 1)[call.source]
        return of_query, of_keys, of_compressed, of_sinks.to(sinks.dtype), None, None, None


def _parts(
    query: Tensor,
    keys: Tensor,
    compressed: Tensor,
    sinks: Tensor,
    choices: Tensor | None,
    call: BlockCall,
    how: tuple[int, int, float],
) -> Iterator[BlocksPart]:
    window, rate, scale = how
    heads = query.shape[1]
    for at, blocks in call.parts(heads):
        rows = query[blocks.queries].flatten(1, 2)
        both = torch.cat([keys[blocks.tokens], compressed[blocks.compressed]], dim=1)
        visible = blocks.sees_tokens(window)
        if rate:
            seen = blocks.sees_compressed(rate)
            visible = torch.cat([visible, seen if choices is None else seen & _chosen(choices, blocks)], dim=-1)
        scores = (rows @ both.mT).to(torch.promote_types(query.dtype, torch.float32)).unflatten(1, (-1, heads)) * scale
        scores = scores.masked_fill_(~visible[:, :, None], -torch.inf)
        of_sinks = sinks.to(scores.dtype)
        most = torch.maximum(scores.amax(-1), of_sinks)
        scores = scores.sub_(most[..., None]).exp_()
        of_sinks = (of_sinks - most).exp()
        total = scores.sum(-1) + of_sinks
        yield BlocksPart(blocks, at, rows, both, scores.div_(total[..., None]).flatten(1, 2), of_sinks / total)


def _chosen(choices: Tensor, blocks: BlockCall) -> Tensor:
    """bool `[B, R, K]`: the windows that queries have chosen; a padded query has another's."""
    columns = blocks.compressed.shape[1]
    numbers = choices[blocks.queries].long()
    found = torch.zeros(*numbers.shape[:-1], columns + 1, dtype=torch.bool, device=choices.device)
    return found.scatter_(-1, numbers.clamp(max=columns), True)[..., :columns]
