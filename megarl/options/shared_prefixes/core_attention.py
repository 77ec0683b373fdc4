"""Attention of streams whose sequences share prefixes, by fused kernels: for Transformer Engine's and megatron-core's layers.

A token attends to its own segment and to the segments before it. Each of these is a pass of a fused kernel: causal within a
segment, full over a segment's keys for all tokens whose sequences go through it. Passes are merged by the log of the sums of
their exponentials (log-sum-exp), and going backward each kernel is given the merged output and log-sum-exp, so gradients are
exact and nothing of the size of tokens times tokens is kept. Whether results are, on a device, those of a plain softmax is
asked once before a role uses it (`check`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.data.stream import PackedStream, Response, StreamShard, Unit, context_parallel_shard, pack
from megarl.errors import ConfigError
from megarl.megatron.attention import QueryRange, ReferenceAttention, StreamAttention, gathered_places, query_ranges
from megarl.megatron.prefetch import on_device
from megarl.options.shared_prefixes import attention_choice

aten = torch.ops.aten

QueryKeyValue = tuple[Tensor, Tensor, Tensor]
FLASH_MULTIPLE = 8
"""Multiple of which torch's flash attention takes heads, up to 256 wide."""


@dataclass
class AttentionPass:
    """One call of a kernel over runs of queries, each with the keys that it attends to.

    `queries` int64 `[n]` are places among this rank's tokens, `keys` int64 `[m]` among the gathered ones, run after run.
    `query_ends`, `key_ends` int32 `[R + 1]` say where each run begins and ends, `lengths` the same as numbers. `causal`: the
    last query of a run stands at its last key, the others before it, and none attends to what is behind it. With a `window`
    it attends to the last so many keys.
    """

    queries: Tensor
    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    lengths: tuple[tuple[int, int], ...]
    causal: bool
    window: int | None

    @property
    def longest(self) -> tuple[int, int]:
        """Lengths of the longest run of queries, and of keys."""
        return max(queries for queries, _ in self.lengths), max(keys for _, keys in self.lengths)


class FlashKernels:
    """torch's flash attention over runs of any length, for CUDA and 16-bit types."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, of: AttentionPass, scale: float) -> tuple[Tensor, Tensor]:
        """`[n, heads, d]`, `[m, groups, d]` and `[m, groups, v]` → `[n, heads, v]` and log-sum-exp `[heads, n]`."""
        wide = self._width(query, value)
        out, lse, *_ = aten._flash_attention_forward(
            *(_widened(t, wide) for t in (query, key, value)),
            of.query_ends,
            of.key_ends,
            *of.longest,
            0.0,
            of.causal,
            False,
            scale=scale,
            **self._window(of),
        )
        return out[..., : value.shape[-1]], lse

    def backward(
        self, gradient: Tensor, inputs: QueryKeyValue, outputs: tuple[Tensor, Tensor], of: AttentionPass, scale: float
    ) -> QueryKeyValue:
        """Gradients of query, key and value; `outputs` of `forward` may be those of more keys than this pass has."""
        (query, key, value), (out, lse) = inputs, outputs
        wide = self._width(query, value)
        # What a random generator began with: without dropout nobody reads it.
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        offset = torch.zeros((), dtype=torch.uint64, device=query.device)
        of_query, of_key, of_value = aten._flash_attention_backward(
            *(_widened(t, wide) for t in (gradient, query, key, value, out)),
            lse.contiguous(),
            of.query_ends,
            of.key_ends,
            *of.longest,
            0.0,
            of.causal,
            seed,
            offset,
            scale=scale,
            **self._window(of),
        )
        return of_query[..., : query.shape[-1]], of_key[..., : key.shape[-1]], of_value[..., : value.shape[-1]]

    @staticmethod
    def _window(of: AttentionPass) -> dict[str, int]:
        return {} if of.window is None else {"window_size_left": of.window - 1, "window_size_right": 0}

    @staticmethod
    def _width(query: Tensor, value: Tensor) -> int:
        widest = max(query.shape[-1], value.shape[-1])
        return widest + -widest % FLASH_MULTIPLE


class CpuKernels:
    """torch's fused attention on a CPU, one run after another, as `FlashKernels` has it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, of: AttentionPass, scale: float) -> tuple[Tensor, Tensor]:
        parts, sums = [], []
        for q, k, v in self._runs(of, query, key, value):
            options, (k, v) = self._options(of, q, k), self._like(q, k, v)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, scale=scale, **options)
            parts.append(out[0].transpose(0, 1)[..., : value.shape[-1]])
            sums.append(lse[0])
        return torch.cat(parts), torch.cat(sums, dim=1)

    def backward(
        self, gradient: Tensor, inputs: QueryKeyValue, outputs: tuple[Tensor, Tensor], of: AttentionPass, scale: float
    ) -> QueryKeyValue:
        groups, width = inputs[1].shape[1], inputs[2].shape[-1]
        out, lse = outputs
        gradients: list[list[Tensor]] = [[], [], []]
        lengths = [queries for queries, _ in of.lengths]
        of_runs = zip(self._runs(of, *inputs), gradient.split(lengths), out.split(lengths), lse.split(lengths, 1), strict=True)
        for (q, k, v), g, o, sums in of_runs:
            options, (k, v) = self._options(of, q, k), self._like(q, k, v)
            g, o = (_widened(t, q.shape[-1]).transpose(0, 1)[None] for t in (g, o))
            causal = options.pop("is_causal", False)
            of_query, *of_others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, sums[None], 0.0, causal, scale=scale, **options
            )
            gradients[0].append(of_query[0].transpose(0, 1))
            for parts, expanded in zip(gradients[1:], of_others, strict=True):
                parts.append(expanded[0].unflatten(0, (groups, -1)).sum(1).transpose(0, 1))
        of_query, of_key, of_value = (torch.cat(parts) for parts in gradients)
        return of_query, of_key, of_value[..., :width]

    @staticmethod
    def _runs(of: AttentionPass, query: Tensor, key: Tensor, value: Tensor) -> Iterable[QueryKeyValue]:
        """`[1, heads, run, d]` each."""
        queries, keys = ([*lengths] for lengths in zip(*of.lengths, strict=True))
        split = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
        return ((q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for q, k, v in split)

    @staticmethod
    def _like(query: Tensor, *others: Tensor) -> list[Tensor]:
        """Keys and values with as many heads as the query, and as wide."""
        heads, width = query.shape[1], query.shape[-1]
        return [_widened(t, width).repeat_interleave(heads // t.shape[1], dim=1) for t in others]

    @staticmethod
    def _options(of: AttentionPass, query: Tensor, key: Tensor) -> dict[str, Any]:
        if of.window is None:
            return {"is_causal": of.causal}
        queries, keys = query.shape[-2], key.shape[-2]
        behind = torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None]
        hidden = (behind > 0) | (behind <= -of.window)
        return {"attn_mask": torch.zeros(queries, keys, dtype=query.dtype).masked_fill_(hidden, -torch.inf)}


_KERNELS: dict[str, FlashKernels | CpuKernels] = {"cuda": FlashKernels(), "cpu": CpuKernels()}
"""By type of device."""


def segment_attention(
    stream: PackedStream,
    share: StreamShard,
    windows: Collection[int | None] = (None,),
) -> StreamAttention:
    """Inputs of `SegmentAttention` for `share`'s tokens in layers with these windows, on the device of `share`."""
    runs = list(chain(*query_ranges(stream, len(share.layout), share.rank)))
    places = gathered_places(share)
    calls = {
        window: _passes(stream, runs, places, share.layout.device)
        if window is None
        else _pass([_in_window(stream, run, window) for run in runs], places, share.layout.device, window=window)
        for window in windows
    }
    positions = stream.position_ids[..., share.positions]
    return StreamAttention(qkv_format="sbhd", calls=calls, position_ids=positions)


_Run = tuple[Tensor, Tensor]
"""The stream's places of a run of queries, and of the keys that it attends to."""


def _passes(
    stream: PackedStream, runs: Sequence[QueryRange], places: tuple[Tensor, int], device: torch.device
) -> tuple[AttentionPass, ...]:
    """Causal among a run's own tokens; what is before them in their segment; and the segments of each depth of the tree."""
    within_runs = [(_places(run), _places(run)) for run in runs]
    earlier = [(_places(run), torch.arange(run.segment.start, run.segment.start + run.first)) for run in runs if run.first]
    below: dict[int, list[QueryRange]] = {}
    for run in runs:
        for number in run.segment.path:
            below.setdefault(number, []).append(run)
    by_depth: dict[int, list[_Run]] = {}
    for number, of_segment in sorted(below.items()):
        segment = stream.segments[number]
        keys = torch.arange(segment.start, segment.start + segment.length)
        by_depth.setdefault(len(segment.path), []).append((torch.cat([_places(run) for run in of_segment]), keys))
    full = [earlier, *(by_depth[depth] for depth in sorted(by_depth))]
    return _pass(within_runs, places, device, causal=True) + tuple(chain(*(_pass(of_pass, places, device) for of_pass in full)))


def _in_window(stream: PackedStream, run: QueryRange, window: int) -> _Run:
    """A run with its own keys and those before it that its first token attends to."""
    start = run.segment.start
    before = stream.tokens_before(run.segment, window - 1 - run.first)
    return _places(run), torch.cat([before, torch.arange(start + max(0, run.first - window + 1), start + run.last)])


def _places(run: QueryRange) -> Tensor:
    return torch.arange(run.segment.start + run.first, run.segment.start + run.last)


def _pass(
    runs: Sequence[_Run],
    places: tuple[Tensor, int],
    device: torch.device,
    *,
    causal: bool = False,
    window: int | None = None,
) -> tuple[AttentionPass, ...]:
    """The pass over `runs`; none if there are none."""
    if not runs:
        return ()
    place_of, first_of_rank = places
    lengths = tuple((len(queries), len(keys)) for queries, keys in runs)
    query_ends, key_ends = (
        torch.tensor([0, *accumulate(of_runs)], dtype=torch.int32, device=device) for of_runs in zip(*lengths, strict=True)
    )
    queries, keys = (place_of[torch.cat(of_runs)].to(device) for of_runs in zip(*runs, strict=True))
    is_causal = causal or window is not None
    return (AttentionPass(queries - first_of_rank, keys, query_ends, key_ends, lengths, is_causal, window),)


class SegmentAttention(ReferenceAttention):
    """Core attention by passes of fused kernels; its parameters are those of the reference attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, calls: tuple[AttentionPass, ...]) -> Tensor:  # type: ignore[override]
        """`query` `[n, heads, d]` of this rank, `key` `[S, groups, d]` and `value` `[S, groups, v]` of all: `[n, heads, v]`."""
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        out: Tensor = MergedPasses.apply(query, key, value, self.softmax_offset, calls, scale)
        return out


class MergedPasses(torch.autograd.Function):
    """All passes over a stream. A head's sink is a key with the value zero whose score is the sink."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        passes: tuple[AttentionPass, ...],
        scale: float,
    ) -> Tensor:
        kernels, exact = _KERNELS[query.device.type], torch.promote_types(query.dtype, torch.float32)
        merged = query.new_zeros(*query.shape[:2], value.shape[-1], dtype=exact)
        lse = query.new_full((query.shape[1], len(query)), -torch.inf, dtype=exact)
        for number, of in enumerate(passes):
            out, sums = kernels.forward(query[of.queries], key[of.keys], value[of.keys], of, scale)
            if number:  # every token was in the first pass
                before = lse[:, of.queries]
                both = torch.logaddexp(before, sums)
                old_share, new_share = ((part - both).exp().T[..., None] for part in (before, sums))
                out, sums = merged[of.queries] * old_share + out * new_share, both
            merged.index_copy_(0, of.queries, out.to(exact))
            lse.index_copy_(1, of.queries, sums.to(exact))
        if sinks is not None:
            both = torch.logaddexp(lse, sinks[:, None].to(exact))
            merged *= (lse - both).exp().T[..., None]
            lse = both
        result = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        ctx.passes, ctx.scale = passes, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        gradient, kernels = grads[0].contiguous(), _KERNELS[query.device.type]
        exact = torch.promote_types(query.dtype, torch.float32)
        of_query, of_key, of_value = (torch.zeros_like(t, dtype=exact) for t in (query, key, value))
        for of in ctx.passes:
            at, seen = of.queries, of.keys
            inputs = query[at], key[seen], value[seen]
            gradients = kernels.backward(gradient[at], inputs, (out[at], lse[:, at]), of, ctx.scale)
            for total, part, where in zip((of_query, of_key, of_value), gradients, (at, seen, seen), strict=True):
                total.index_add_(0, where, part.to(exact))
        of_sinks = None
        if sinks is not None:
            # The share of a token's attention that its sink takes, times what the value zero changes.
            taken = (sinks[:, None].to(exact) - lse).exp()
            of_sinks = -(taken * (gradient.to(exact) * out).sum(-1).T).sum(1).to(sinks.dtype)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None, None


def _widened(heads: Tensor, width: int) -> Tensor:
    """`[..., d]` filled up with zeros to `[..., width]`."""
    return F.pad(heads, (0, width - heads.shape[-1])) if heads.shape[-1] < width else heads


CHECKED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""By type, how much results may differ from a plain softmax, as a share of the largest."""


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse kernels whose results on this device are not those of a plain softmax: a small stream, forward and backward.

    Raises:
        ConfigError: torch has no such kernel here, or its results are others.
    """
    try:
        worst = _difference(device, dtype)
    except (RuntimeError, KeyError) as error:
        why = str(error).splitlines()[0]
    else:
        if worst <= CHECKED[dtype]:
            return
        why = f"its results differ by {worst:.1g} from a plain softmax"
    reason = f"needs torch's flash attention in {str(dtype).removeprefix('torch.')} on {device}: {why}"
    raise ConfigError.of("policy.share_prefix", "true", reason, allowed="false here")


def _difference(device: torch.device, dtype: torch.dtype) -> float:
    """The largest one of an output or a gradient, as a share of the largest value of its kind."""
    tokens, mask = torch.arange(48), torch.ones(48, dtype=torch.bool)
    responses = [Response(n, torch.cat([tokens[:20], 100 * n + tokens[:28]]), mask) for n in range(3)]
    stream = pack([Unit(tokens[:33], responses), Unit(tokens[:17], responses[:1])])
    attention = segment_attention(stream, context_parallel_shard(stream, 1, 0), windows=(None, 25))
    size, positions, worst = len(stream.token_ids), stream.position_ids, 0.0
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]
    visible = torch.zeros(size, size, dtype=torch.bool)
    for segment in stream.segments:
        span = slice(segment.start, segment.start + segment.length)
        visible[span, span] = torch.ones(segment.length, segment.length).tril().bool()
        for number in segment.path:
            above = stream.segments[number]
            visible[span, above.start : above.start + above.length] = True
    for window, calls in on_device(attention, device).calls.items():
        seen = visible if window is None else visible & (positions[:, None] - positions[None] < window)
        actual = _with_gradients(drawn, device, lambda q, k, v, calls=calls: MergedPasses.apply(q, k, v, None, calls, 0.125))
        expected = _with_gradients([t.float() for t in drawn], torch.device("cpu"), partial(_plain, seen=seen))
        for value, reference in zip(actual, expected, strict=True):
            worst = max(worst, float((value - reference).abs().max() / reference.abs().max()))
    return worst


def _with_gradients(drawn: Sequence[Tensor], device: torch.device, attend: Callable[..., Tensor]) -> list[Tensor]:
    """The output of `attend` and the gradients of query, key and value, in float32 in main memory."""
    inputs = [tensor.to(device).requires_grad_() for tensor in drawn[:3]]
    with torch.enable_grad():
        out = attend(*inputs)
        gradients = torch.autograd.grad(out, inputs, drawn[3].to(device))
    return [tensor.detach().float().cpu() for tensor in (out, *gradients)]


def _plain(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.125
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


NAME, MODULE = attention_choice.NAME, SegmentAttention
attention_of = segment_attention
