"""One pass of micro-batches through a role's model by megatron-core's own schedules, forward only or with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megarl.data.stream import MicroBatch, PackedStream, pack, split_shared_prompts
from megarl.megatron.attention import stream_attention
from megarl.megatron.options import ModelOptions

LossFunction = Callable[[Tensor, PackedStream], tuple[Tensor, dict[str, float]]]
"""(model output `[N, C]`, stream) → (scalar loss already divided by its global denominator, metric sums)."""


def forward(
    chunks: Sequence[Any], options: ModelOptions, micro_batches: Sequence[MicroBatch], *, score_at: bool = False
) -> dict[int, Tensor]:
    """Outputs per response without gradients: `{response index: float32 [L, C]}`, zero where nothing is scored.

    With `score_at` scores are taken at the tokens in the mask, else before them.

    C is 2 (log-prob, entropy) for a log-prob head and 1 for a value head. Only ranks of the last pipeline stage
    get a result; others get an empty dict.
    """
    results: dict[int, Tensor] = {}

    def collect(output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, float]]:
        columns = [stream.split(output[:, c]) for c in range(output.shape[1])]
        for index in columns[0]:
            results[index] = torch.stack([column[index] for column in columns], dim=-1)
        return output.sum(), {}

    with torch.no_grad():
        _run(chunks, options, micro_batches, collect, forward_only=True, score_at=score_at)
    return results


def forward_backward(
    chunks: Sequence[Any],
    options: ModelOptions,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    *,
    score_at: bool = False,
) -> dict[str, float]:
    """Accumulate and reduce the gradients of the summed loss; returns the metric sums of this rank's last stage."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    totals: dict[str, float] = {}
    for metrics in _run(chunks, options, micro_batches, loss_function, forward_only=False, score_at=score_at):
        for name, value in metrics.items():
            totals[name] = max(totals.get(name, value), value) if name.endswith("_max") else totals.get(name, 0) + value
    return totals


def _run(
    chunks: Sequence[Any],
    options: ModelOptions,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    *,
    forward_only: bool,
    score_at: bool,
) -> list[dict[str, float]]:
    device = torch.device(torch.cuda.current_device())
    layout = options.layout
    multiple = layout.tp if layout.sequence_parallel else 1
    shared = options.layer_spec == "reference"
    streams = [
        pack(units if shared else split_shared_prompts(units), pad_to_multiple=multiple, score_at=score_at).to(device)
        for units in micro_batches
    ]
    config = get_model_config(chunks[0])
    config.grad_scale_func = None
    iterators = [iter(streams) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, options=options, loss_function=loss_function),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(streams),
        seq_length=max(len(s.token_ids) for s in streams),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _forward_step(
    streams: Iterator[PackedStream], model: torch.nn.Module, *, options: ModelOptions, loss_function: LossFunction
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, float]]]]:
    stream = next(streams)
    core: Any = unwrap_model(model)
    if options.layer_spec != "transformer_engine":
        core.rotary_pos_emb.position_ids = stream.position_ids
    if core.post_process:
        core.output_layer.request = (stream.rows, stream.targets)
    mask, packed = _attention_inputs(stream, options.layer_spec)
    output = model(
        input_ids=stream.token_ids[None],
        position_ids=stream.position_ids[None],
        attention_mask=mask,
        packed_seq_params=packed,
    )

    def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        value, metrics = loss_function(output[0], stream)
        return value, torch.ones((), dtype=torch.int), metrics

    return output, loss


def _attention_inputs(stream: PackedStream, layer_spec: str) -> tuple[Tensor | None, PackedSeqParams | None]:
    """How each layer spec is told who attends to whom: indices, a dense mask (True = hidden) or cumulative lengths."""
    if layer_spec == "reference":
        return None, stream_attention(stream)
    size, device = len(stream.token_ids), stream.token_ids.device
    if layer_spec == "local":
        owner = torch.full((size,), -1, device=device)
        for number, segment in enumerate(stream.segments):
            owner[segment.start : segment.start + segment.length] = number
        place = torch.arange(size, device=device)
        visible = (owner[:, None] == owner[None]) & (place[:, None] >= place[None])
        return ~visible[None, None], None
    ends = [segment.start + segment.length for segment in stream.segments]
    if ends[-1] < size:
        ends.append(size)
    cumulative = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    longest = int((cumulative[1:] - cumulative[:-1]).max())
    return None, PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
