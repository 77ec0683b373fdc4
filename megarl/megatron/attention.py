"""The `reference` attention: packed streams on plain torch, for machines without Transformer Engine.

Exact causal attention per segment of a `PackedStream`, in two batched calls: one for the segments without a prefix,
one for the responses that share their unit's prompt. Padding is gathered in and masked out, never attended to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.data.stream import PackedStream, Segment


@dataclass
class SegmentIndex:
    """Gather and scatter indices of one batched attention call over B segments, padded to R queries and C keys.

    `queries` `[B, R]` and `keys` `[B, C]` are stream positions (0 where padded), `mask` bool `[B, 1, R, C]` is True
    where a query may look (None: plain causal), `source` `[M]` are the places in the flat `[B * R]` result that
    hold real tokens and `target` `[M]` their stream positions.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    source: Tensor
    target: Tensor


@dataclass
class StreamAttention(PackedSeqParams):
    """What travels to the attention as megatron-core's `packed_seq_params`: the indices of a stream's segments."""

    plain: SegmentIndex | None = None
    prefixed: SegmentIndex | None = None


def stream_attention(stream: PackedStream) -> StreamAttention:
    """The attention indices of `stream`, on its device. `qkv_format` stays `sbhd`: the stream is `[S, 1, ...]`."""
    device = stream.token_ids.device
    plain = [s for s in stream.segments if not s.prefix_length]
    prefixed = [s for s in stream.segments if s.prefix_length]
    return StreamAttention(
        qkv_format="sbhd",
        plain=_index(plain, device) if plain else None,
        prefixed=_index(prefixed, device) if prefixed else None,
    )


def _index(segments: list[Segment], device: torch.device) -> SegmentIndex:
    starts = torch.tensor([s.start for s in segments])[:, None]
    lengths = torch.tensor([s.length for s in segments])[:, None]
    prefix_starts = torch.tensor([s.prefix_start for s in segments])[:, None]
    prefix_lengths = torch.tensor([s.prefix_length for s in segments])[:, None]
    own = torch.arange(int(lengths.max()))[None]
    real = own < lengths
    queries = torch.where(real, starts + own, 0)
    source = real.flatten().nonzero().flatten()
    target = queries.flatten()[source]
    if not int(prefix_lengths.max()):
        return SegmentIndex(queries.to(device), queries.to(device), None, source.to(device), target.to(device))
    prefix = torch.arange(int(prefix_lengths.max()))[None]
    in_prefix = prefix < prefix_lengths
    keys = torch.cat([torch.where(in_prefix, prefix_starts + prefix, 0), queries], dim=1)
    causal = own[..., None] >= own[:, None]
    width, height = prefix.shape[1], own.shape[1]
    mask = torch.cat([in_prefix[:, None].expand(-1, height, width), causal.expand(len(segments), -1, -1)], dim=2)
    return SegmentIndex(queries.to(device), keys.to(device), mask[:, None].to(device), source.to(device), target.to(device))


class ReferenceAttention(torch.nn.Module):
    """Core attention of the `reference` layer spec: takes `[S, 1, heads, d]`, gives `[S, 1, heads * d]`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

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
        """Attention of the stream's segments; positions in no segment (padding) come out as zero."""
        assert packed_seq_params is not None, "the reference attention runs packed streams only"
        repeat = query.shape[2] // key.shape[2]
        query, key, value = (t[:, 0] for t in (query, key, value))
        targets, parts = [], []
        for index in (packed_seq_params.plain, packed_seq_params.prefixed):
            if index is None:
                continue
            q = query[index.queries].transpose(1, 2)
            k = key[index.keys].transpose(1, 2).repeat_interleave(repeat, dim=1)
            v = value[index.keys].transpose(1, 2).repeat_interleave(repeat, dim=1)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=index.mask, is_causal=index.mask is None, scale=self.softmax_scale
            )
            parts.append(out.transpose(1, 2).flatten(0, 1)[index.source])
            targets.append(index.target)
        result = query.new_zeros(query.shape).index_copy(0, torch.cat(targets), torch.cat(parts))
        return result.flatten(1)[:, None]
