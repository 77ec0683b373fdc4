"""The `reference` attention: packed streams on plain torch, for machines without Transformer Engine.

Exact causal attention per segment of a `PackedStream`, in few batched calls. Under context parallelism each rank has the
queries of its own tokens, and the keys and values of the whole stream are gathered. Padding is gathered in and masked
out, never attended to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.data.stream import PackedStream, Segment, StreamShard
from megarl.megatron.layer_windows import ChunkWindow, window_of
from megarl.megatron.plain_attention import plain_attention
from megarl.option_list import parts


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
class PackedSequences(PackedSeqParams):
    """The value that travels to the attention as megatron-core's `packed_seq_params`, so that a recomputed layer sees the same.

    `order` is for layers with an attention variant: its `order_of` the stream's tokens. `position_ids` int64 `[S/cp]`, or
    `[3, S/cp]`, are those of this rank's tokens.
    """

    order: Any = None
    position_ids: Tensor | None = None


@dataclass
class StreamAttention(PackedSequences):
    """The attention of a stream's tokens, for layers that are told who attends to whom.

    `calls` are what the core attention of a layer needs, by its window in tokens (None: it attends to all).
    """

    calls: Mapping[int | None, tuple[Any, ...]] = field(default_factory=dict)


def variant_of(config: TransformerConfig) -> ModuleType | None:
    """The attention that some layers have in place of the other: an option's `attention_variant.py`; None: no layer has any.

    Its `NAME` is megatron-core's `experimental_attention_variant`, `put_into(layer, layer_spec, sizes)` puts it into the spec
    of a layer, and `order_of(stream, config)` is what its layers must know of a stream.
    """
    name = config.experimental_attention_variant
    return None if name is None else next(module for module in parts("attention_variant") if name == module.NAME)


def core_attention_called(name: str) -> ModuleType:
    """The core attention that an option has for the layers of any spec: the `core_attention.py` with this `NAME`.

    `MODULE` is its class, `attention_of(stream, share, windows)` makes what its `forward` is given as `packed_seq_params`, and
    `check(device, dtype)` raises ConfigError where it computes something else.
    """
    return next(module for module in parts("core_attention") if name == module.NAME)


@dataclass(frozen=True)
class QueryRange:
    """Queries at places `first` to `last` (excluded) of their segment; they look at its path and at places below `last`."""

    segment: Segment
    first: int
    last: int

    def is_plain(self, window: int | None) -> bool:
        return not self.first and not self.segment.path and (window is None or self.last <= window)

    def call(self, window: int | None) -> tuple[bool, int]:
        """Runs for which this is equal are computed together: of one kind, and none twice as long as another."""
        return self.is_plain(window), (self.last - self.first).bit_length()


def stream_attention(
    stream: PackedStream,
    share: StreamShard,
    dtype: torch.dtype,
    windows: Collection[int | None] = (None,),
) -> StreamAttention:
    """The attention of `share`'s tokens, on its device, for queries of type `dtype` and layers with these windows.

    `qkv_format` stays `sbhd`: the tokens are `[S/cp, 1, ...]`.
    """
    gathered_index, first_of_rank = gathered_places(share)
    device = share.layout.device
    runs = list(query_ranges(stream, len(share.layout), share.rank))
    calls = {
        window: tuple(
            _call(stream, list(together), window, gathered_index, first_of_rank, dtype, device)
            for of_chunk in runs
            for _, together in groupby(sorted(of_chunk, key=kind), key=kind)
        )
        for window in windows
        for kind in [partial(QueryRange.call, window=window)]
    }
    positions = stream.position_ids[..., share.positions]
    return StreamAttention(qkv_format="sbhd", calls=calls, position_ids=positions)


def gathered_places(share: StreamShard) -> tuple[Tensor, int]:
    """int64 `[S]`: where each token of the stream lies when the ranks' tokens are gathered; and where this rank's begin."""
    layout = share.layout.cpu()
    gathered_index = torch.empty(layout.numel(), dtype=torch.long)
    gathered_index[layout.flatten()] = torch.arange(len(gathered_index))
    return gathered_index, share.rank * layout.shape[1]


def query_ranges(stream: PackedStream, cp: int, rank: int) -> Iterable[list[QueryRange]]:
    """The runs of real queries that `rank` holds, its early chunks apart from its late ones, which look at more keys."""
    chunks, chunk_places = (1, [0]) if cp == 1 else (2 * cp, [rank, 2 * cp - 1 - rank])
    ends = stream.boundaries[1:]
    for chunk in chunk_places:
        runs = []
        for segment, end in zip(stream.segments, ends, strict=False):
            size = (end - segment.start) // chunks
            first, last = chunk * size, min((chunk + 1) * size, segment.length)
            if first < last:
                runs.append(QueryRange(segment, first, last))
        yield runs


def _call(
    stream: PackedStream,
    runs: list[QueryRange],
    window: int | None,
    place: Tensor,
    first_of_rank: int,
    dtype: torch.dtype,
    device: torch.device,
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
    if not runs[0].is_plain(window):
        before = [stream.tokens_before(r.segment, r.segment.before) for r in runs]
        prefix_lengths = column(map(len, before))
        prefix = torch.arange(int(prefix_lengths.max()))[None]
        in_prefix = prefix < prefix_lengths
        keys = torch.cat([torch.nn.utils.rnn.pad_sequence(before, batch_first=True), keys], dim=1)
        causal = own_query[..., None] >= own_key[:, None]
        visible = torch.cat([in_prefix[:, None].expand(-1, own_query.shape[1], -1), causal], dim=2)
        if window is not None:
            positions = torch.cat([prefix.expand(len(runs), -1), prefix_lengths + own_key], dim=1)
            own = prefix_lengths + own_query
            oldest = own - (own % window + 1 if isinstance(window, ChunkWindow) else window)
            # Rows that only fill up see what they did: they must see something, or their gradient is no number.
            visible &= (positions[:, None] > oldest[..., None]) | ~real[..., None]
        # In the queries' type: a bool mask would be converted, and kept for the backward pass, by every layer anew.
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)[:, None].to(device)
    return AttentionCall(
        queries.to(device), place[keys].to(device), bias, source.to(device), queries.flatten()[source].to(device)
    )


class ReferenceAttention(torch.nn.Module):
    """Core attention of the `reference` layer spec; with sinks where the config's `softmax_type` is `learnable`."""

    score_cap: float | None = None
    """See `DecoderTraits`; `core_traits.capping_scores` sets it."""

    def __init__(
        self,
        config: TransformerConfig,
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
        self.window = window_of(config, layer_number)
        self.tp_group = None if pg_collection is None else pg_collection.tp
        self.softmax_offset: Tensor | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // (1 if self.tp_group is None else self.tp_group.size())
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
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
        query, key, value = (t.flatten(0, -3) for t in (query, key, value))
        if self.cp_group is not None and self.cp_group.size() > 1:
            # The backward pass sums over the ranks what each one's queries ask of a key.
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=self.cp_group
            )
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        calls = packed_seq_params.calls[self.window]
        if not calls:
            # Nothing but padding here, yet the other ranks' backward pass waits for this one to join in their sums.
            return (query.new_zeros(*query.shape[:2], value.shape[-1]) + value[:0].sum()).flatten(1)[:, None]
        return self.attend(query, key, value, calls).flatten(1)[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, calls: tuple[AttentionCall, ...]) -> Tensor:
        """`query` `[n, heads, d]` of this rank, `key` `[S, groups, d]` and `value` `[S, groups, v]` of all: `[n, heads, v]`."""
        repeat = query.shape[1] // key.shape[1]
        result = query.new_zeros(*query.shape[:2], value.shape[-1])
        targets, parts = [], []
        for call in calls:
            q = query[call.queries].transpose(1, 2)
            k, v = key[call.keys].transpose(1, 2), value[call.keys].transpose(1, 2)
            if self.softmax_offset is None and self.score_cap is None:
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=call.bias, is_causal=call.bias is None, scale=self.softmax_scale, enable_gqa=True
                )
            else:
                k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
                out = plain_attention(q, k, v, call.bias, self.softmax_scale, self.softmax_offset, self.score_cap)
            parts.append(out.transpose(1, 2).flatten(0, 1)[call.source])
            targets.append(call.target)
        return result.index_copy(0, torch.cat(targets), torch.cat(parts))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks, split as the heads are."""
        if self.softmax_offset is None:
            return {}
        of_rank, groups = {"softmax_offset": self.softmax_offset}, {"dp_cp_group": (metadata or {})["dp_cp_group"]}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            of_rank, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group, **groups
        )
        return sharded
