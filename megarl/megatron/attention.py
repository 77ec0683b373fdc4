"""The `reference` attention: packed streams on plain torch, for machines without Transformer Engine.

Exact causal attention per segment of a `PackedStream`, in few batched calls. Under context parallelism each rank has the
queries of its own tokens, and the keys and values of the whole stream are gathered. Padding is gathered in and masked
out, never attended to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.data.stream import PackedStream, Segment, StreamShard
from megarl.megatron.recurrence import Recurrence


@dataclass
class AttentionCall:
    """Gather and scatter indices of one batched attention call over B runs of queries, padded to R queries and C keys.

    `queries` `[B, R]` are places among this rank's tokens and `keys` `[B, C]` among the gathered ones (0 where padded),
    `bias` `[B, 1, R, C]` is 0 where a query may look and -inf elsewhere (None: plain causal, and R = C), `source` `[M]` are
    the places in the flat `[B * R]` result that hold real tokens and `target` `[M]` their places among this rank's tokens.
    """

    queries: Tensor
    keys: Tensor
    bias: Tensor | None
    source: Tensor
    target: Tensor


@dataclass
class StreamAttention(PackedSeqParams):
    """What travels to the attention as megatron-core's `packed_seq_params`, so that a recomputed layer sees the same.

    `position_ids` int64 `[S/cp]` are those of this rank's tokens. `recurrence` is for layers with linear attention.
    """

    calls: tuple[AttentionCall, ...] = ()
    position_ids: Tensor | None = None
    recurrence: Recurrence | None = None


@dataclass(frozen=True)
class _QueryRange:
    """Queries at places `first` to `last` (excluded) of their segment; they look at its prefix and at places below `last`."""

    segment: Segment
    first: int
    last: int

    @property
    def is_plain(self) -> bool:
        return not self.first and not self.segment.prefix_length

    @property
    def call(self) -> tuple[bool, int]:
        """Runs for which this is equal are computed together: of one kind, and none twice as long as another."""
        return self.is_plain, (self.last - self.first).bit_length()


def stream_attention(
    stream: PackedStream, share: StreamShard, dtype: torch.dtype, recurrence: Recurrence | None = None
) -> StreamAttention:
    """The attention of `share`'s tokens, on its device, for queries of type `dtype`.

    `qkv_format` stays `sbhd`: the tokens are `[S/cp, 1, ...]`.
    """
    place = torch.empty(len(stream.token_ids), dtype=torch.long)
    place[share.layout.flatten().cpu()] = torch.arange(len(place))
    first_of_rank = share.rank * share.layout.shape[1]
    device = share.layout.device
    calls = [
        _call(list(together), place, first_of_rank, dtype, device)
        for runs in _runs(stream, len(share.layout), share.rank)
        for _, together in groupby(sorted(runs, key=lambda run: run.call), key=lambda run: run.call)
    ]
    positions = stream.position_ids[..., share.positions]
    return StreamAttention(qkv_format="sbhd", calls=tuple(calls), position_ids=positions, recurrence=recurrence)


def _runs(stream: PackedStream, cp: int, rank: int) -> Iterable[list[_QueryRange]]:
    """The runs of real queries that `rank` holds, its early chunks apart from its late ones, which look at more keys."""
    chunks, chunk_places = (1, [0]) if cp == 1 else (2 * cp, [rank, 2 * cp - 1 - rank])
    ends = stream.boundaries[1:]
    for place in chunk_places:
        runs = []
        for segment, end in zip(stream.segments, ends, strict=False):
            size = (end - segment.start) // chunks
            first, last = place * size, min((place + 1) * size, segment.length)
            if first < last:
                runs.append(_QueryRange(segment, first, last))
        yield runs


def _call(
    runs: list[_QueryRange], place: Tensor, first_of_rank: int, dtype: torch.dtype, device: torch.device
) -> AttentionCall:
    def column(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values))[:, None]

    starts, firsts, lasts = (column(v) for v in zip(*((r.segment.start, r.first, r.last) for r in runs), strict=True))
    own_query = firsts + torch.arange(int((lasts - firsts).max()))[None]
    real = own_query < lasts
    queries = torch.where(real, place[torch.where(real, starts + own_query, 0)] - first_of_rank, 0)
    source = real.flatten().nonzero().flatten()
    own_key = torch.arange(int(lasts.max()))[None]
    keys = torch.where(own_key < lasts, starts + own_key, 0)
    bias = None
    if not runs[0].is_plain:
        prefix_starts = column(r.segment.prefix_start for r in runs)
        prefix_lengths = column(r.segment.prefix_length for r in runs)
        prefix = torch.arange(int(prefix_lengths.max()))[None]
        in_prefix = prefix < prefix_lengths
        keys = torch.cat([torch.where(in_prefix, prefix_starts + prefix, 0), keys], dim=1)
        causal = own_query[..., None] >= own_key[:, None]
        visible = torch.cat([in_prefix[:, None].expand(-1, own_query.shape[1], -1), causal], dim=2)
        # In the queries' type: a bool mask would be converted, and kept for the backward pass, by every layer anew.
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)[:, None].to(device)
    return AttentionCall(
        queries.to(device), place[keys].to(device), bias, source.to(device), queries.flatten()[source].to(device)
    )


class ReferenceAttention(torch.nn.Module):
    """Core attention of the `reference` layer spec."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_group = None if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: StreamAttention | None = None,
    ) -> Tensor:
        """Attention of this rank's tokens; positions in no segment (padding) come out as zero.

        `query`, `key` `[S/cp, (1,) heads, d]` and `value` `[S/cp, (1,) heads, v]`, with as many or fewer heads in key and
        value, → `[S/cp, 1, heads * v]`.
        """
        assert packed_seq_params is not None, "the reference attention runs packed streams only"
        repeat = query.shape[-2] // key.shape[-2]
        query, key, value = (t.flatten(0, -3) for t in (query, key, value))
        if self.cp_group is not None and self.cp_group.size() > 1:
            # The backward pass sums over the ranks what each one's queries ask of a key.
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=self.cp_group
            )
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        result = query.new_zeros(*query.shape[:2], value.shape[-1])
        if not packed_seq_params.calls:
            # Nothing but padding here, yet the other ranks' backward pass waits for this one to join in their sums.
            return (result + value[:0].sum()).flatten(1)[:, None]
        targets, parts = [], []
        for call in packed_seq_params.calls:
            q = query[call.queries].transpose(1, 2)
            k = key[call.keys].transpose(1, 2).repeat_interleave(repeat, dim=1)
            v = value[call.keys].transpose(1, 2).repeat_interleave(repeat, dim=1)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=call.bias, is_causal=call.bias is None, scale=self.softmax_scale
            )
            parts.append(out.transpose(1, 2).flatten(0, 1)[call.source])
            targets.append(call.target)
        return result.index_copy(0, torch.cat(targets), torch.cat(parts)).flatten(1)[:, None]
