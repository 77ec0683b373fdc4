"""Compressed keys: means of a window's tokens, weighted channel by channel, and an indexer that chooses among them."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.latent_attention import ReplicatedLinear
from megarl.megatron.norms import ReferenceRMSNorm
from megarl.options.compressed_attention.rotation import Waves
from megarl.options.compressed_attention.sizes import CompressedSizes
from megarl.options.compressed_attention.windows import BlockCall, CompressedOrder, Windows


class Compressor(torch.nn.Module):
    """Keys of width `head_dim`, one for each window of `rate` tokens, or, where it `overlaps`, of a window and the one before.

    A token then has two series of values: its first for the next window's key, its second for its own window's. Projections
    are of each rank's tokens; what comes behind is the same on all tensor ranks.
    """

    def __init__(self, config: TransformerConfig, head_dim: int, rate: int, *, overlaps: bool, epsilon: float) -> None:
        super().__init__()
        self.head_dim, self.overlaps = head_dim, overlaps
        self.width = head_dim * (2 if overlaps else 1)
        self.linear_kv = ReplicatedLinear(config.hidden_size, self.width, config)
        self.linear_gate = ReplicatedLinear(config.hidden_size, self.width, config)
        self.position_bias = torch.nn.Parameter(torch.empty(rate, self.width, dtype=config.params_dtype))
        self.norm = ReferenceRMSNorm(config, head_dim, epsilon)
        self.norm.weight.sequence_parallel = False  # type: ignore[attr-defined]

    def projected(self, hidden: Tensor) -> Tensor:
        """`[n, 1, H]` to values and gates `[n, 1, 2 * width]`."""
        return torch.cat([self.linear_kv(hidden), self.linear_gate(hidden)], dim=-1)

    def forward(self, projected: Tensor, windows: Windows, waves: Waves) -> Tensor:
        """From `[N, 2 * width]` of all tokens to keys `[E, head_dim]`, rotated at their windows' positions."""
        values, gates = projected.split(self.width, dim=-1)
        at, gates_at = values[windows.tokens], gates[windows.tokens] + self.position_bias
        if self.overlaps:
            now = slice(self.head_dim, None), slice(self.head_dim)
            before, gates_before = values[windows.before], gates[windows.before] + self.position_bias
            gates_before = gates_before.masked_fill(windows.is_first[:, None, None], -torch.inf)
            at = torch.cat([before[..., now[1]], at[..., now[0]]], dim=1)
            gates_at = torch.cat([gates_before[..., now[1]], gates_at[..., now[0]]], dim=1)
        shares = gates_at.softmax(1, dtype=torch.promote_types(gates_at.dtype, torch.float32)).to(at.dtype)
        return waves.rotated(self.norm((at * shares).sum(1)), windows.positions)


class WindowIndexer(torch.nn.Module):
    """Scores of compressed keys, Σ over heads of w · relu(q · k): which of them a query attends to. It has no gradient.

    Under sequence parallelism each tensor rank projects its own tokens, and all share out the scores of the queries.
    """

    def __init__(self, config: TransformerConfig, sizes: CompressedSizes, rate: int, tp_group: torch.distributed.ProcessGroup):
        super().__init__()
        self.heads, self.head_dim, self.top_k, self.rate = sizes.index_heads, sizes.index_dim, sizes.top_k, rate
        self.tp_group, self.is_split = tp_group, config.sequence_parallel
        self.compressor = Compressor(config, self.head_dim, rate, overlaps=True, epsilon=sizes.epsilon)
        self.linear_wq_b = ReplicatedLinear(sizes.query_rank, self.heads * self.head_dim, config)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, self.heads, config)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,
        latent: Tensor,
        positions: Tensor,
        waves: Waves,
        order: CompressedOrder,
        cp_group: torch.distributed.ProcessGroup,
    ) -> Tensor | None:
        """int32 `[n, top_k]`: of each of this rank's tokens the chosen windows of its sequence, by number, the best one again
        where they are fewer; None: no query sees more than `top_k`."""
        calls = order.calls[self.rate]
        if not any(call.compressed.shape[1] > self.top_k for call in calls) and cp_group.size() == 1:
            return None
        projected = self._gathered(self.compressor.projected(hidden))
        query = self._gathered(self.linear_wq_b(latent)).unflatten(-1, (self.heads, self.head_dim))
        weights = self._gathered(self.linear_weights_proj(hidden))
        if cp_group.size() > 1:
            projected = gather_from_sequence_parallel_region(projected, group=cp_group)
        exact = torch.promote_types(query.dtype, torch.float32)
        keys = self.compressor(projected, order.windows[self.rate], waves).to(exact)
        query = waves.rotated(query, positions).to(exact)
        return self._chosen(query, keys, weights.to(exact) * (self.heads * self.head_dim) ** -0.5, calls)

    def _gathered(self, tokens: Tensor) -> Tensor:
        """`[n, 1, d]` to `[S/cp, d]`."""
        return (gather_from_sequence_parallel_region(tokens, group=self.tp_group) if self.is_split else tokens)[:, 0]

    def _chosen(self, query: Tensor, keys: Tensor, weights: Tensor, calls: tuple[BlockCall, ...]) -> Tensor:
        """Choices of queries `[n, h, d]` with `weights` `[n, h]` among `keys` `[E, d]`; tensor ranks share out the parts."""
        choices = torch.zeros(len(query), self.top_k, dtype=torch.int32, device=query.device)
        number, ranks = 0, self.tp_group.size()
        for call in calls:
            chosen = choices.new_zeros(*call.queries.shape, self.top_k)
            for part, blocks in call.parts(self.heads):
                if number % ranks == self.tp_group.rank():
                    of_heads = query[blocks.queries].flatten(1, 2) @ keys[blocks.compressed].mT
                    of_heads = of_heads.unflatten(1, (-1, self.heads)).relu()
                    scores = (weights[blocks.queries][:, :, None] @ of_heads)[:, :, 0]
                    chosen[part] = best(scores, blocks.sees_compressed(self.rate), self.top_k)
                number += 1
            choices[call.target] = chosen.flatten(0, 1)[call.source]
        if ranks > 1:
            torch.distributed.all_reduce(choices, group=self.tp_group)
        return choices


def best(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """int32 `[..., top_k]`: of the `visible` columns those of the highest scores `[..., K]`, of equal ones the first; the best
    one again where they are fewer, and column 0 where there is none."""
    scores = scores.masked_fill(~visible, -torch.inf)
    ordered = scores.sort(stable=True, dim=-1, descending=True).indices[..., :top_k]
    ordered = torch.nn.functional.pad(ordered, (0, max(0, top_k - ordered.shape[-1])))
    is_one = torch.arange(top_k, device=scores.device) < visible.sum(-1, keepdim=True)
    first = ordered[..., :1] if scores.shape[-1] else torch.zeros_like(ordered[..., :1])
    return torch.where(is_one, ordered, first).int()
