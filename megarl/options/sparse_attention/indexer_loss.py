"""The loss that trains an indexer: how far its scores are from what attention does, KL(p ‖ softmax(scores)) of each query.

p is the sum over all heads of how much of each key they take, over the number of heads (DeepSeek-V3.2, eqs. 3 and 4). `dense`
compares all keys before a query, as the warm-up of the published training does, `sparse` those that are chosen. Scores alone
get gradients: p is a constant, and the layer's inputs are detached before the indexer reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.options.sparse_attention.calls import IndexedCall, IndexedOrder, QueryRows, chosen_keys
from megarl.options.sparse_attention.indexer import Scored


class Attended(NamedTuple):
    """Attention as it is: `query` `[n, h, d]` of this rank's heads and tokens, and `key` `[N, h, d]` of all gathered tokens.

    The keys that are compared are the `choices` of the queries (`IndexedOrder.choices`), or all if that is None. The heads are
    shared out over `tp_group`.
    """

    query: Tensor
    key: Tensor
    choices: Tensor | None
    scale: float
    tp_group: torch.distributed.ProcessGroup

    def compared(self, call: IndexedCall, rows: QueryRows) -> Tensor:
        """bool `[B, rows, keys]`."""
        return call.visible(rows) if self.choices is None else chosen_keys(self.choices, call, rows)

    def target(self, call: IndexedCall, rows: QueryRows, compared: Tensor) -> Tensor:
        """p `[B, rows, keys]` over the `compared` ones: the same on all tensor ranks, of which each computes its heads."""
        query = self.query[call.queries[:, rows.first : rows.last]].transpose(1, 2)
        key = self.key[call.keys[:, : rows.keys]].transpose(1, 2)
        scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * self.scale
        of_heads = scores.masked_fill_(~compared[:, None], -torch.inf).softmax(-1).sum(1)
        if self.tp_group.size() > 1:
            torch.distributed.all_reduce(of_heads, group=self.tp_group)
        return of_heads / (self.query.shape[1] * self.tp_group.size())


def indexer_loss(scored: Scored, attended: Attended, order: IndexedOrder) -> Tensor:
    """Σ over this rank's queries of KL · `order.weights`, a scalar; going backward to the parts of `scored`."""
    loss: Tensor = _IndexerLoss.apply(*scored, attended, order)
    return loss


class _IndexerLoss(torch.autograd.Function):
    """Keeps the gradients of the three parts of the score, which the forward pass computes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, weights: Tensor, attended: Attended, order: IndexedOrder) -> Tensor:
        assert order.weights is not None, "a stream's tokens have weights where indexers are trained"
        scored, loss = Scored(query, key, weights), weights.new_zeros(())
        grads = Scored(*(torch.zeros_like(part) for part in scored))
        for call, rows in _all_rows(order, max(query.shape[1], attended.query.shape[1])):
            at, keys = call.queries[:, rows.first : rows.last], call.keys[:, : rows.keys]
            compared = attended.compared(call, rows)
            of_queries = order.weights[at] * call.real[:, rows.first : rows.last]
            target = attended.target(call, rows, compared)
            raw = (query[at].flatten(1, 2) @ key[keys].mT).unflatten(1, (rows.last - rows.first, -1))
            scores = (weights[at][:, :, None] @ raw.relu())[:, :, 0]
            log_shares = scores.masked_fill(~compared, -torch.inf).log_softmax(-1)
            terms = torch.special.xlogy(target, target) - target * log_shares.masked_fill(~compared, 0.0)
            loss += (terms.sum(-1) * of_queries).sum()
            of_scores = (log_shares.exp() - target) * of_queries[..., None]
            of_raw = of_scores[:, :, None] * weights[at][..., None] * (raw > 0)
            grads.weights.index_put_((at,), (raw.relu() @ of_scores[..., None])[..., 0], accumulate=True)
            of_query = (of_raw.flatten(1, 2) @ key[keys]).unflatten(1, of_raw.shape[1:3])
            grads.query.index_put_((at,), of_query, accumulate=True)
            grads.key.index_put_((keys,), of_raw.flatten(1, 2).mT @ query[at].flatten(1, 2), accumulate=True)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(part * grads[0] for part in ctx.saved_tensors), None, None


def _all_rows(order: IndexedOrder, heads: int) -> Iterator[tuple[IndexedCall, QueryRows]]:
    return ((call, rows) for call in order.calls for rows in call.chunks(heads))
