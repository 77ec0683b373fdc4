"""Latent attention to chosen keys, for the `reference` layer spec; scores are made in chunks of queries."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.megatron.attention import PackedSequences
from megarl.megatron.balance_losses import WithLoss
from megarl.megatron.latent_attention import LatentSelfAttention, Rotation
from megarl.options.sparse_attention.calls import IndexedCall, IndexedOrder, QueryRows, chosen_keys
from megarl.options.sparse_attention.indexer import Indexer, Scored, Told, choose
from megarl.options.sparse_attention.indexer_loss import Attended, indexer_loss
from megarl.options.sparse_attention.sparse_family import Indexing


class IndexedAttention(torch.nn.Module):
    """Core attention of a layer, to the keys that its indexer, or that of the layer it follows, has chosen."""

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert isinstance(config.linear_attention_freq, list)
        self.scale = softmax_scale or 1.0  # latent attention says which; before, megatron-core 0.16.1 builds another one
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        kinds = [Indexing(kind) for kind in config.linear_attention_freq[:layer_number]]
        self.chooser = max(number for number, kind in enumerate(kinds, 1) if Indexing.CHOOSES in kind)
        """The layer, counted from 1, whose choices it takes."""
        self.has_indexer = self.chooser == layer_number
        followed = any(Indexing.FOLLOWS in Indexing(kind) for kind in config.linear_attention_freq[self.chooser :][:1])
        self.kept_under = self.chooser if followed or config.recompute_granularity == "selective" else 0
        """Where choices are kept: until the micro-batch ends if another layer, or this one, reads them anew going backward."""
        if self.has_indexer:
            self.indexer = Indexer(config, rotates_pairs=Indexing.PAIRS in kinds[-1], tp_group=self.tp_group)
            self.indexer.requires_grad_(config.dsa_indexer_loss_coeff is not None)
        self.loss_coeff, self.loss_is_sparse = config.dsa_indexer_loss_coeff, config.dsa_indexer_use_sparse_loss
        self.batch_tokens = 1.0
        """Tokens of the batch over which the loss of its indexer is a mean."""
        self.place = sum(Indexing.CHOOSES in kind for kind in kinds) - 1
        """Number of the indexer that chooses for it, among those of the model."""
        self.told_counts: list[Tensor] = []
        """`Told.counts` of the micro-batches since somebody took them."""
        self.losses: list[Tensor] = []
        """Its values, not yet times `loss_coeff`, of the micro-batches since somebody took them."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attention of this rank's tokens; positions in no segment (padding) come out as zero.

        `query`, `key` `[n, 1, heads, d]` and `value` `[n, 1, heads, v]` → `[n, 1, heads * v]`.
        """
        assert packed_seq_params is not None, "the reference attention runs packed streams only"
        order: IndexedOrder = packed_seq_params.order
        query, key, value = (t.flatten(0, -3) for t in (query, key, value))
        if self.cp_group.size() > 1:
            # The backward pass sums over the ranks what each one's queries ask of a key.
            both = gather_from_sequence_parallel_region(
                torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=self.cp_group
            )
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        choices = order.choices[self.kept_under]
        return _ToChosenKeys.apply(query, key, value, choices, order.calls, self.scale).flatten(1)[:, None]

    def choose(self, scored: Scored, order: IndexedOrder, top_k: int) -> Tensor:
        """The choices of its indexer, or those that come with the stream. What is computed anew is not counted again."""
        if order.told is None:
            return choose(scored, order, top_k, self.tp_group)
        told = Told(order.told.bits[self.place].to(scored.query.device), top_k)
        choices = choose(scored, order, top_k, self.tp_group, told)
        if self.place not in order.told.counted:
            order.told.counted.add(self.place)
            self.told_counts.append(told.counts)
        return choices

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The indexer's parameters, whole on every tensor rank."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets, **groups
        )
        return entries


class IndexedLatentAttention(LatentSelfAttention):
    """Latent attention whose indexer, if it has one, chooses keys before its core attention reads them."""

    core_attention: IndexedAttention

    def prepared(
        self, query: Tensor, key: Tensor, hidden: Tensor, latent: Tensor | None, rotation: Rotation, packed: PackedSequences
    ) -> Tensor:
        """Keep the choices for the core attention of this layer and of those that follow it."""
        core, order = self.core_attention, packed.order
        if not core.has_indexer:
            return query
        assert latent is not None
        learns = torch.is_grad_enabled() and core.indexer.linear_wk.weight.requires_grad
        with torch.set_grad_enabled(learns):
            scored = core.indexer(hidden.detach(), latent.detach(), rotation, core.cp_group)
        choices = order.choices[core.kept_under] = core.choose(scored, order, self.config.dsa_indexer_topk)
        if not learns:
            return query
        keys = key.detach().flatten(0, -3)
        if core.cp_group.size() > 1:
            keys = gather_from_sequence_parallel_region(keys, group=core.cp_group)
        attended = Attended(
            query.detach().flatten(0, -3), keys, choices if core.loss_is_sparse else None, core.scale, core.tp_group
        )
        loss = indexer_loss(scored, attended, order) / core.batch_tokens
        core.losses.append(loss.detach())
        return WithLoss.apply(query, loss * core.loss_coeff)


class _ToChosenKeys(torch.autograd.Function):
    """`query` `[n, h, d]`, `key` `[N, h, d]`, `value` `[N, h, v]` → `[n, h, v]`; keeps these and the choices `[n, k]`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        choices: Tensor,
        calls: tuple[IndexedCall, ...],
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, choices)
        ctx.calls, ctx.scale = calls, scale
        result = query.new_zeros(*query.shape[:2], value.shape[-1])
        for call in calls:
            of_keys, of_values = (t[call.keys].transpose(1, 2) for t in (key, value))
            of_runs = result.new_empty(*call.queries.shape, *result.shape[1:])
            for rows in call.chunks(query.shape[1]):
                of_queries = query[call.queries[:, rows.first : rows.last]].transpose(1, 2)
                shares = attention_shares(of_queries, of_keys, choices, call, rows, scale).to(value.dtype)
                of_runs[:, rows.first : rows.last] = (shares @ of_values[:, :, : rows.keys]).transpose(1, 2)
            result[call.target] = of_runs.flatten(0, 1)[call.source]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, choices = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros_like(t) for t in (query, key, value))
        for call in ctx.calls:
            of_keys, of_values = (t[call.keys].transpose(1, 2) for t in (key, value))
            keys_grad, values_grad = torch.zeros_like(of_keys), torch.zeros_like(of_values)
            asked = grads[0].new_zeros(call.queries.numel(), *grads[0].shape[1:])
            asked[call.source] = grads[0][call.target]
            asked = asked.unflatten(0, call.queries.shape)
            queries_grad = query.new_empty(*call.queries.shape, *query.shape[1:])
            for rows in call.chunks(query.shape[1]):
                of_queries = query[call.queries[:, rows.first : rows.last]].transpose(1, 2)
                grad, seen = asked[:, rows.first : rows.last].transpose(1, 2), slice(rows.keys)
                shares = attention_shares(of_queries, of_keys, choices, call, rows, ctx.scale)
                values_grad[:, :, seen] += shares.to(grad.dtype).mT @ grad
                of_shares = (grad @ of_values[:, :, seen].mT).to(shares.dtype)
                of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True)) * ctx.scale
                of_scores = of_scores.to(query.dtype)
                queries_grad[:, rows.first : rows.last] = (of_scores @ of_keys[:, :, seen]).transpose(1, 2)
                keys_grad[:, :, seen] += of_scores.mT @ of_queries
            of_query[call.target] = queries_grad.flatten(0, 1)[call.source]
            places = call.keys.flatten()
            of_key.index_add_(0, places, keys_grad.transpose(1, 2).flatten(0, 1))
            of_value.index_add_(0, places, values_grad.transpose(1, 2).flatten(0, 1))
        return of_query, of_key, of_value, None, None, None


def attention_shares(query: Tensor, key: Tensor, choices: Tensor, call: IndexedCall, rows: QueryRows, scale: float) -> Tensor:
    """`[B, h, rows, keys]` in float32 or better: how much of each key queries `[B, h, rows, d]` take, none of others than those
    of `choices`. `key` `[B, h, C, d]` are all of the call."""
    scores = (query @ key[:, :, : rows.keys].mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    return scores.masked_fill_(~chosen_keys(choices, call, rows)[:, None], -torch.inf).softmax(-1)
