"""One pass of micro-batches through a role's model by megatron-core's own schedules, forward only or with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megarl.data.answers import Answers
from megarl.data.stream import (
    MicroBatch,
    PackedStream,
    Response,
    ScoredValues,
    ScorePosition,
    StreamShard,
    TopK,
    Unit,
    context_parallel_shard,
    laid_tokens,
    pack,
    split_shared_prompts,
)
from megarl.data.stream_sequences import TokenSequences
from megarl.megatron.asked_rows import AskedRows
from megarl.megatron.attention import PackedSequences, core_attention_called, stream_attention, variant_of
from megarl.megatron.context_parallel import gather_scored
from megarl.megatron.heads import HeadRequest
from megarl.megatron.layer_windows import windows_of
from megarl.megatron.model_config import DTYPES
from megarl.megatron.options import ModelOptions
from megarl.megatron.pass_parts import PassParts
from megarl.megatron.prefetch import Prefetched, on_device
from megarl.megatron.rotary import PackedRotaryEmbedding

LossFunction = Callable[[Tensor, PackedStream], tuple[Tensor, dict[str, Any]]]
"""(model output `[N, C]`, stream) → (scalar loss already divided by its global denominator, metric sums).

Sums are numbers or tensors of one element, which are read when the pass is over: to ask for a number is to wait for the device.
`ScoredValues` become a dictionary by response; one is joined with those of other micro-batches, not summed.
"""

NO_PARTS = PassParts()


@dataclass
class PassProgress:
    """Progress of the pass under way: micro-batches begun (per model chunk), and all of them (0: no pass)."""

    begun: int = 0
    wanted: int = 0


def forward(
    chunks: Sequence[Any],
    options: ModelOptions,
    micro_batches: Sequence[MicroBatch],
    *,
    position: ScorePosition = ScorePosition.NEXT,
    progress: PassProgress | None = None,
    top_k: TopK | None = None,
    parts: PassParts = NO_PARTS,
) -> Answers:
    """Outputs per response without gradients: `{response index: float32 [L, C]}`, zero where nothing is scored.

    `progress` is kept up to date, for another thread to look at.

    C is 1 for a value head. A log-prob head gives log-prob and entropy, with the option `collision` the collision probability,
    then the log-probs of the tokens in the column `SCORED_IDS`, if there is one, then the ids of the `top_k` likeliest tokens
    and their log-probs.

    Only ranks of the last pipeline stage get a result; others get none.
    """
    streams: list[PackedStream] = []
    outputs: list[Tensor] = []

    def collect(output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        streams.append(stream)
        outputs.append(output)
        return output.sum(), {}

    scheduled = partial(_scheduled, chunks, options, micro_batches, position=position, progress=progress, parts=parts)
    with torch.no_grad(), scheduled(collect, forward_only=True, top_k=top_k) as run:
        run()
    return Answers.joined([stream.answers(output) for stream, output in zip(streams, on_host(outputs), strict=True)])


def forward_backward(
    chunks: Sequence[Any],
    options: ModelOptions,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    *,
    position: ScorePosition = ScorePosition.NEXT,
    progress: PassProgress | None = None,
    parts: PassParts = NO_PARTS,
    adds: bool = False,
    within: AbstractContextManager[None] | None = None,
) -> dict[str, Any]:
    """Accumulate and reduce the gradients of the summed loss; returns the metric sums of this rank's last stage.

    What routers decide is counted by `parts.watch`, which adds the losses that keep experts in balance. With `adds` the
    gradients join those that are there. `within` is entered for the pass.
    """
    if not adds:
        for chunk in chunks:
            chunk.zero_grad_buffer()
    totals: dict[str, Any] = {}
    scheduled = partial(_scheduled, chunks, options, micro_batches, position=position, progress=progress, parts=parts)
    if parts.watch is not None and parts.watch.counts_first:
        with torch.no_grad(), scheduled(_no_loss, forward_only=True) as run:
            run()
        parts.watch.keep_loads()
    with within or nullcontext(), scheduled(loss_function, forward_only=False) as run:
        of_micro_batches = run()
    for metrics in metrics_on_host(of_micro_batches):
        add_metrics(totals, metrics)
    return totals


def add_metrics(totals: dict[str, Any], metrics: Mapping[str, Any]) -> None:
    """Add the metric sums of a further part of a batch to `totals`; of those called `_max` the largest stays."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            totals[name] = totals.get(name, {}) | value
        else:
            totals[name] = max(totals.get(name, value), value) if name.endswith("_max") else totals.get(name, 0) + value


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in main memory, as float64, by a single transfer: each one waits for all that the device still has to do."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def metrics_on_host(of_micro_batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Metrics with numbers in place of tensors, and arrays by response in place of `ScoredValues`."""
    numbers = [dict(metrics) for metrics in of_micro_batches]
    waiting = [
        (metrics, name, value)
        for metrics in numbers
        for name, value in metrics.items()
        if isinstance(value, Tensor | ScoredValues)
    ]
    host = on_host([value if isinstance(value, Tensor) else value.values for _, _, value in waiting])
    for (metrics, name, value), here in zip(waiting, host, strict=True):
        if isinstance(value, Tensor):
            metrics[name] = float(here)
        else:
            answers = value.stream.answers(here.reshape(len(here), -1))
            shown = ((index, row) for index, row in answers.items() if index < value.before)
            metrics[name] = {index: row.reshape(-1, *here.shape[1:]).numpy() for index, row in shown}
    return numbers


@contextmanager
def _scheduled(
    chunks: Sequence[Any],
    options: ModelOptions,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    position: ScorePosition,
    progress: PassProgress | None,
    *,
    forward_only: bool,
    top_k: TopK | None = None,
    parts: PassParts = NO_PARTS,
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """megatron-core's schedule of a pass, to be called once: metrics of each micro-batch. Its inputs are made meanwhile."""
    device = torch.device(torch.cuda.current_device())
    parts = parts.joining(training=not forward_only)
    filled = [(units, loss_function) for units in micro_batches]
    if options.layout.vpp is not None:
        # megatron-core's interleaved schedule takes micro-batches in rounds of as many as there are stages.
        filled += [(_NOTHING, _no_loss)] * (-len(filled) % options.layout.pp)
    config = get_model_config(chunks[0])
    variant = variant_of(config)
    if not options.shares_prefixes:
        filled = [(split_shared_prompts(units), loss) for units, loss in filled]
    longest = _longest([units for units, _ in filled], options, position)
    shape = _PassShape(
        position,
        tokens=longest if options.padded_tokens is not None else None,
        order_of=None if variant is None else partial(variant.order_of, config=config),
        windows=windows_of(config),
    )
    laid = [partial(_lay, units, loss, options, shape, device, parts) for units, loss in filled]
    all_laid: list[_Laid] = []
    has_balance = parts.watch is not None and parts.watch.balance.has_losses and not forward_only
    if any(part.reads_ahead for part in parts.parts) or has_balance:
        # Each of them reads all micro-batches before the first.
        all_laid = [lay() for lay in laid]
        laid = [partial(_itself, laid_out) for laid_out in all_laid]
    for number, part in enumerate(parts.parts):
        part.begin(
            [(laid_out.on_device, laid_out.held) for laid_out in all_laid], [laid_out.given[number] for laid_out in all_laid]
        )
    if parts.watch is not None:
        parts.watch.begin([laid_out.routed for laid_out in all_laid], trains=not forward_only)
    config.grad_scale_func = None
    progress = progress or PassProgress()
    progress.begun, progress.wanted = 0, len(filled) * len(chunks)
    makers = [partial(_prepare, lay, options, shape, device) for lay in laid]
    with Prefetched(makers, device, takers=len(chunks)) as inputs:
        iterators = [inputs.iterator() for _ in chunks]
        yield partial(
            get_forward_backward_func(),
            forward_step_func=partial(_forward_step, options=options, progress=progress, top_k=top_k, parts=parts),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(filled),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    progress.wanted = 0


_NOTHING: MicroBatch = [
    Unit(torch.zeros(1, dtype=torch.long), [Response(-1, torch.zeros(1, dtype=torch.long), torch.tensor([False]))])
]
"""A token that nobody asks about."""


def _no_loss(output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, float]]:
    return output.sum(), {}


@dataclass(frozen=True)
class _PassShape:
    """The common shape of a pass's micro-batches.

    `tokens`: each is padded to so many; None: to what its layout needs. `order_of` a stream is what layers with an attention
    variant must know of it; None: there are none. `windows` are those of the layers.
    """

    position: ScorePosition
    tokens: int | None
    order_of: Callable[[PackedStream], Any] | None
    windows: Collection[int | None]


class _Laid(NamedTuple):
    """A micro-batch: the whole stream, the same on all ranks of a replica, and what this rank holds of it.

    `stream` and `share` are in main memory, all else is on the device, these two as `on_device` and `held`. `asked` are the
    rows of the head. `positions` is how many positions the rotary embedding must know. `given` is what each part of an option
    needs, `routed` the tokens whose experts are counted.
    """

    stream: PackedStream
    share: StreamShard
    on_device: PackedStream
    held: StreamShard
    asked: AskedRows
    positions: int
    given: Sequence[Any]
    routed: TokenSequences | None
    loss_function: LossFunction


class _Prepared(NamedTuple):
    """A micro-batch that can be run, with what tells the layers who attends to whom."""

    laid: _Laid
    mask: Tensor | None
    packed: PackedSeqParams | None


def _lay(
    units: MicroBatch,
    loss_function: LossFunction,
    options: ModelOptions,
    shape: _PassShape,
    device: torch.device,
    parts: PassParts,
) -> _Laid:
    arguments = laying(options)
    if shape.tokens is not None:
        arguments["pad_to_multiple"] = shape.tokens
    stream = pack(units, position=shape.position, **arguments)
    share = context_parallel_shard(stream, options.layout.cp, parallel_state.get_context_parallel_rank())
    return _Laid(
        stream,
        share,
        stream.to(device),
        share.to(device),
        AskedRows.of(stream, share).to(device),
        int(stream.position_ids.max()) + 1,
        [part.lay(units, stream, share, device) for part in parts.parts],
        parts.watch.tokens_of(stream, share).to(device) if parts.watch is not None else None,
        loss_function,
    )


def _longest(micro_batches: Sequence[MicroBatch], options: ModelOptions, position: ScorePosition) -> int:
    """Tokens of the longest stream, and no fewer than all are padded to."""
    arguments = laying(options)
    multiple, least = arguments["pad_to_multiple"], options.padded_tokens or 0
    lengths = (laid_tokens(units, position=position, **arguments) for units in micro_batches)
    return max(-(-least // multiple) * multiple, *lengths)


def _prepare(lay: Callable[[], _Laid], options: ModelOptions, shape: _PassShape, device: torch.device) -> _Prepared:
    laid = lay()
    mask, packed = attention_inputs(laid.stream, laid.share, options, shape.windows, device)
    if shape.order_of is not None:
        packed = replace(packed, order=on_device(shape.order_of(laid.stream), device))
    return _Prepared(laid, mask, packed)


def _itself(laid: _Laid) -> _Laid:
    return laid


def laying(options: ModelOptions) -> dict[str, Any]:
    """The arguments by which `pack` lays a stream: what it pads it and its segments to, and what responses share.

    Where passes record and replay routes, which are each response's own, all of them have streams of one form.
    """
    layout = options.layout
    of_rank = options.token_multiple * (layout.tp if layout.sequence_parallel else 1)
    of_segment = 1 if layout.cp == 1 else 2 * layout.cp
    return {
        "pad_to_multiple": math.lcm(layout.cp * of_rank, of_segment),
        "segment_multiple": of_segment,
        "share_turns": not options.replays_routes,
    }


def _forward_step(
    inputs: Iterator[_Prepared],
    model: torch.nn.Module,
    *,
    options: ModelOptions,
    progress: PassProgress,
    top_k: TopK | None,
    parts: PassParts,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]]:
    laid, mask, packed = next(inputs)
    stream, share, loss_function = laid.on_device, laid.held, laid.loss_function
    progress.begun += 1
    core: Any = unwrap_model(model)
    token_ids, position_ids = stream.token_ids[share.positions], stream.position_ids[..., share.positions]
    # All are read in this very forward call, outside the layers that may be recomputed later.
    rotary = getattr(core, "rotary_pos_emb", None)  # megatron-core gives models with latent attention none
    if isinstance(rotary, PackedRotaryEmbedding):
        # Of the whole stream's angles Transformer Engine's layers pick their rank's themselves.
        whole = options.layer_spec == "transformer_engine" and options.core_attention == "spec"
        rotary.positions = (stream.position_ids if whole else position_ids, laid.positions)
    if core.post_process:
        core.output_layer.request = HeadRequest(laid.asked.rows, laid.asked.targets, top_k)
    with parts.micro_batch(core, laid.given, laid.routed):
        output = model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            attention_mask=mask,
            packed_seq_params=packed,
        )

    def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        mine = laid.asked.of_tokens(output[0])
        whole = gather_scored(mine, share.scored, len(stream.rows), parallel_state.get_context_parallel_group())
        value, metrics = loss_function(whole, stream)
        for further in filter(None, (part.loss(core) for part in parts.parts)):
            value, metrics = value + further[0], metrics | further[1]
        # kept until the pass is over, but not what they were computed from
        detached = {name: metric.detach() if isinstance(metric, Tensor) else metric for name, metric in metrics.items()}
        return value, torch.ones((), dtype=torch.int), detached

    return output, loss


def attention_inputs(
    stream: PackedStream,
    share: StreamShard,
    options: ModelOptions,
    windows: Collection[int | None],
    device: torch.device,
) -> tuple[Tensor | None, Any]:
    """Make what tells each layer spec who attends to whom: indices, a dense mask (True = hidden) or cumulative lengths.

    They are made in main memory, where `stream` and `share` are, and copied to `device`.
    """
    if options.core_attention != "spec":
        attention_of = core_attention_called(options.core_attention).attention_of
        return None, on_device(attention_of(stream, share, windows), device)
    if options.layer_spec == "reference":
        return None, on_device(stream_attention(stream, share, DTYPES[options.dtype], windows), device)
    if options.layer_spec == "local":
        return _dense_mask(stream).to(device), None
    positions = stream.position_ids[..., share.positions]
    return None, replace(packed_lengths(stream, device), position_ids=on_device(positions, device))


def _dense_mask(stream: PackedStream) -> Tensor:
    size, device = len(stream.token_ids), stream.token_ids.device
    owner = torch.full((size,), -1, device=device)
    for number, segment in enumerate(stream.segments):
        owner[segment.start : segment.start + segment.length] = number
    positions = torch.arange(size, device=device)
    visible = (owner[:, None] == owner[None]) & (positions[:, None] >= positions[None])
    return ~visible[None, None]


def packed_lengths(stream: PackedStream, device: torch.device) -> PackedSequences:
    """`stream`, whose prompts are not shared, as Transformer Engine's packed (THD) sequences, on `device`.

    The lengths are those of the whole stream; under context parallelism each rank passes its tokens in the order of
    `zigzag`. Padding ends its sequence, where causal attention lets no other token see it, so it counts as part
    of it: with lengths apart from padded lengths, Transformer Engine could not choose flash attention.
    """
    cumulative = torch.tensor([*stream.boundaries], dtype=torch.int32).to(device)
    longest = max(end - start for start, end in pairwise(stream.boundaries))
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        cu_seqlens_q_padded=cumulative,
        cu_seqlens_kv_padded=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
