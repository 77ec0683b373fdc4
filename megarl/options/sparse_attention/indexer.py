"""The indexer of a layer: scores of all keys that a query may look at, in chunks of queries, and the best of them.

The score of a key is Σ over heads of w · relu(q · k · d^−½) (DeepSeek-V3.2, eq. 1), with w scaled by heads^−½. Among keys of
the same score the first of the sequence is chosen, whatever the device's top-k would take.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megarl.megatron.latent_attention import ReplicatedLinear, Rotation
from megarl.options.sparse_attention.calls import IndexedCall, IndexedOrder, QueryRows, told_bits

KEY_NORM_EPS = 1e-6
"""transformers', whatever `rms_norm_eps` says."""


class Scored(NamedTuple):
    """The parts of a score: `query` `[n, h, d]` and `weights` `[n, h]` of this rank's tokens, `key` `[N, d]` of all
    gathered ones. `weights` have the scales of the score."""

    query: Tensor
    key: Tensor
    weights: Tensor

    def scores(self, call: IndexedCall, rows: QueryRows) -> Tensor:
        """`[B, rows, keys]`, of keys that may not be looked at too."""
        at = call.queries[:, rows.first : rows.last]
        query, weights, key = self.query[at], self.weights[at], self.key[call.keys[:, : rows.keys]]
        of_heads = (query.flatten(1, 2) @ key.mT).unflatten(1, query.shape[1:3]).relu()
        return (weights[:, :, None] @ of_heads)[:, :, 0]


class IndexKeyNorm(torch.nn.Module):
    """LayerNorm with a bias; under sequence parallelism megatron-core sums the gradients of both."""

    def __init__(self, width: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(width, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., d]` to `[..., d]`."""
        return F.layer_norm(hidden, hidden.shape[-1:], self.weight, self.bias, KEY_NORM_EPS)


class Indexer(torch.nn.Module):
    """The projections of an indexer, whole on every tensor rank, under megatron-core's names.

    Under sequence parallelism each tensor rank projects its own tokens, and all share out the scores of the queries.
    """

    def __init__(self, config: MLATransformerConfig, *, rotates_pairs: bool, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        assert config.q_lora_rank is not None
        self.heads, self.head_dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.rotates_pairs, self.tp_group, self.is_split = rotates_pairs, tp_group, config.sequence_parallel
        self.linear_wq_b = ReplicatedLinear(config.q_lora_rank, self.heads * self.head_dim, config)
        self.linear_wk = ReplicatedLinear(config.hidden_size, self.head_dim, config)
        self.k_norm = IndexKeyNorm(self.head_dim, config)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, self.heads, config)

    def forward(self, hidden: Tensor, latent: Tensor, rotation: Rotation, cp_group: torch.distributed.ProcessGroup) -> Scored:
        """From `hidden` `[n, 1, H]` and the queries' latent `[n, 1, r]`, split once more under sequence parallelism."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        query = self._gathered(self.linear_wq_b(latent)[:, 0]).unflatten(-1, (self.heads, self.head_dim))
        key = self._gathered(self.k_norm(self.linear_wk(hidden))[:, 0])
        weights = self._gathered(F.linear(hidden.to(exact), self.linear_weights_proj.weight.to(exact))[:, 0])
        query, key = self._rotated(query, rotation).to(exact), self._rotated(key[:, None], rotation)[:, 0].to(exact)
        if cp_group.size() > 1:  # going backward, a key's gradient is the sum over the ranks whose queries score it
            key = gather_from_sequence_parallel_region(key, tensor_parallel_output_grad=True, group=cp_group)
        return Scored(query, key, weights * (self.heads**-0.5 * self.head_dim**-0.5))

    def _gathered(self, tokens: Tensor) -> Tensor:
        """Going backward each tensor rank takes the gradients of its own tokens: all ranks have those of all tokens."""
        if not self.is_split:
            return tokens
        return gather_from_sequence_parallel_region(tokens, tensor_parallel_output_grad=False, group=self.tp_group)

    def _rotated(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """`[n, h, d]` whose first dimensions rotate; in the result their pairs may be in another order."""
        rotated, rest = heads.split([rotation.width, heads.shape[-1] - rotation.width], dim=-1)
        return torch.cat([rotation.pairs(rotated) if self.rotates_pairs else rotation.halves(rotated), rest], dim=-1)


class Told:
    """The choices of one layer's indexer that come with this rank's queries, `bits` `[n, W]`, and `counts` of them.

    Int64 `[4]`, of the queries that see more than `top_k` keys: how many there are, how many of them come with a choice, the
    keys of these, and those of them that the indexer would not choose.
    """

    def __init__(self, bits: Tensor, top_k: int) -> None:
        self.bits, self.top_k = bits, top_k
        self.counts = torch.zeros(4, dtype=torch.long, device=bits.device)

    def followed(self, live: Tensor, visible: Tensor, call: IndexedCall, rows: QueryRows) -> Tensor:
        """bool `[B, rows, keys]`: the told choices where they are known, else those of `live`."""
        told = told_bits(self.bits, call, rows) & visible
        number = told.sum(-1)
        is_known = (number > 0) & (number <= self.top_k)  # all bits are set where the choice is not
        counted = (visible.sum(-1) > self.top_k) & call.real[:, rows.first : rows.last]
        of_known = counted & is_known
        differing = (told & ~live).sum(-1)
        self.counts += torch.stack([counted.sum(), of_known.sum(), (number * of_known).sum(), (differing * of_known).sum()])
        return torch.where(is_known[..., None], told, live)


@torch.no_grad()
def choose(
    scored: Scored, order: IndexedOrder, top_k: int, tp_group: torch.distributed.ProcessGroup, told: Told | None = None
) -> Tensor:
    """The choices of this rank's queries as `IndexedOrder.choices` has them, those that they come with where these are `told`.

    Ranks of `tp_group`, which have the same queries, share out the chunks.
    """
    width, ranks = order.width(top_k), tp_group.size()
    choices = torch.zeros(len(scored.query), width, dtype=torch.int32, device=scored.query.device)
    number = 0
    for call in order.calls:
        chosen = choices.new_zeros(*call.queries.shape, width)
        for rows in call.chunks(scored.query.shape[1]):
            if number % ranks == tp_group.rank():
                chosen[:, rows.first : rows.last] = _chosen(scored, call, rows, top_k, width, told)
            number += 1
        choices[call.target] = chosen.flatten(0, 1)[call.source]
    if ranks > 1:
        torch.distributed.all_reduce(choices, group=tp_group)
    return choices


def _chosen(scored: Scored, call: IndexedCall, rows: QueryRows, top_k: int, width: int, told: Told | None) -> Tensor:
    """int32 `[B, rows, width]`."""
    chosen = visible = call.visible(rows)
    if rows.keys > top_k:
        chosen = best(scored.scores(call, rows), visible, top_k)
    if told is not None:
        chosen = told.followed(chosen, visible, call, rows)
    return columns_of(chosen, width)


def best(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """bool `[..., C]`: of the `visible` ones the `top_k` of the highest scores `[..., C]`, of equal ones the first."""
    scores = scores.masked_fill(~visible, -torch.inf)
    least = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
    above, level = scores > least, (scores == least) & visible
    left = top_k - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= left))


def columns_of(chosen: Tensor, width: int) -> Tensor:
    """int32 `[..., width]`: the columns of the true entries of `[..., C]`, at least one and at most `width`, in order; then
    the first one again."""
    number = chosen.cumsum(-1)
    columns = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device).expand(chosen.shape)
    places = torch.where(chosen, number - 1, width)
    found = columns.new_zeros(*chosen.shape[:-1], width + 1).scatter_(-1, places, columns)[..., :width]
    is_one = torch.arange(width, device=chosen.device) < number[..., -1:]
    return torch.where(is_one, found, found[..., :1])
