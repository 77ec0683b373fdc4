"""Micro-batches that pipeline stages hold at most at once, under megatron-core's 1F1B and interleaved schedules."""

from __future__ import annotations


def in_flight(pp: int, vpp: int, stage: int, micro_batches: int) -> float:
    """Number of micro-batches that a stage holds at most at once; with virtual stages in parts of a micro-batch."""
    if vpp == 1:
        return min(micro_batches, pp - stage)
    ahead = (pp - stage - 1) * 2 + (vpp - 1) * pp + 1
    return min(-(-micro_batches // pp) * pp * vpp, ahead) / vpp


def first_chunk_in_flight(pp: int, vpp: int, micro_batches: int) -> int:
    """Number of micro-batches that the first model chunk holds at most at once: they come first and leave last.

    With virtual stages `pp` micro-batches go through a chunk, then through the next; the first backward pass that frees one of
    the first chunk comes when two such rounds have begun, whatever `vpp` is.
    """
    return min(micro_batches, pp) if vpp == 1 else min(-(-micro_batches // pp) * pp, 2 * pp)
