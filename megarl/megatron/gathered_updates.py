"""Gradients of several passes for one optimizer step, for loops that ask for passes and steps apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from megatron.core.utils import get_model_config

from megarl.data.stream import MicroBatch, ScorePosition
from megarl.megatron.rank_model import RankModel
from megarl.megatron.step import LossFunction, add_metrics
from megarl.megatron.update_guard import WatchedLoss
from megarl.observe.expert_load import EXPERTS


@dataclass(frozen=True)
class Gathered:
    """Passes whose gradients no optimizer step has applied: their metric sums, and whether their losses were finite."""

    metrics: dict[str, Any] = field(default_factory=dict)
    is_finite: bool = True


def gather(
    role: RankModel,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    position: ScorePosition = ScorePosition.NEXT,
) -> dict[str, Any]:
    """Add the gradients of the summed loss of `micro_batches` to those since the last optimizer step, for `apply_gathered`.

    Losses that keep experts in balance are those of each pass. A pass that fails takes those before it along.

    Returns metric sums of this rank on reporting ranks, and what layers with experts routed under `EXPERTS`, on the leading
    rank of their stage.
    """
    before, role.gathered = role.gathered, None
    watched = WatchedLoss(loss_function)
    run = role.training_pass(micro_batches, watched, position)
    metrics, is_finite = role.outcome(run(adds=before is not None, within=_unreduced(role.chunks)), watched)
    before = before or Gathered()
    add_metrics(before.metrics, metrics)
    role.gathered = Gathered(before.metrics, is_finite=before.is_finite and is_finite)
    routed = {}
    if role.watch is not None:
        routed = role.watch.tell()
        role.watch.set_aside()
    return metrics | ({EXPERTS: routed} if routed else {})


def apply_gathered(role: RankModel) -> dict[str, Any]:
    """One optimizer step by the gathered gradients; returns what `RankModel.update` does, without the metric sums."""
    assert role.gathered is not None, "passes come before a step"
    gathered, role.gathered = role.gathered, None
    reduce_gradients(role.chunks)
    applied = role.apply(dict(gathered.metrics), is_finite=gathered.is_finite)
    return {name: value for name, value in applied.items() if name not in gathered.metrics}


@contextmanager
def _unreduced(chunks: Sequence[Any]) -> Iterator[None]:
    """Meanwhile megatron-core's schedule leaves every rank its own gradients."""
    config = get_model_config(chunks[0])
    before = config.finalize_model_grads_func, config.no_sync_func
    config.finalize_model_grads_func, config.no_sync_func = None, nullcontext
    try:
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        config.finalize_model_grads_func, config.no_sync_func = before


def reduce_gradients(chunks: Sequence[Any]) -> None:
    """Sum the gradients of all ranks, as the last micro-batch of an update's pass does; collective over the world."""
    if chunks[0].ddp_config.overlap_grad_reduce:  # else the reduction begins where it is waited for
        for chunk in chunks:
            chunk.start_grad_sync()
    get_model_config(chunks[0]).finalize_model_grads_func([*chunks])
