"""Attention by segments in the place of the layers' own core attention, and a check before a role uses it.

The check is whether it is, on this device, what a plain softmax is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megarl.data.stream import Response, Unit, context_parallel_shard, pack
from megarl.errors import ConfigError
from megarl.megatron.prefetch import on_device
from megarl.options.shared_prefixes import attention_choice
from megarl.options.shared_prefixes.segment_attention import MergedPasses, SegmentAttention, segment_attention

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
        own = slice(segment.start, segment.start + segment.length)
        visible[own, own] = torch.ones(segment.length, segment.length).tril().bool()
        for number in segment.path:
            above = stream.segments[number]
            visible[own, above.start : above.start + above.length] = True
    for window, calls in on_device(attention, device).calls.items():
        seen = visible if window is None else visible & (positions[:, None] - positions[None] < window)
        found = _with_gradients(drawn, device, lambda q, k, v, calls=calls: MergedPasses.apply(q, k, v, None, calls, 0.125))
        expected = _with_gradients([t.float() for t in drawn], torch.device("cpu"), partial(_plain, seen=seen))
        for one, other in zip(found, expected, strict=True):
            worst = max(worst, float((one - other).abs().max() / other.abs().max()))
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
