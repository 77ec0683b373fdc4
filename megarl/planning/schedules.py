"""How many micro-batches pipeline stages hold at most at once, under megatron-core's 1F1B and interleaved schedules."""

from __future__ import annotations


def in_flight(pp: int, vpp: int, stage: int, micro_batches: int) -> float:
    """How many micro-batches a stage holds at most at once; with virtual stages in parts of a micro-batch."""
    if vpp == 1:
        return min(micro_batches, pp - stage)
    ahead = (pp - stage - 1) * 2 + (vpp - 1) * pp + 1
    return min(-(-micro_batches // pp) * pp * vpp, ahead) / vpp


def first_chunk_in_flight(pp: int, vpp: int, micro_batches: int) -> int:
    """How many micro-batches the first model chunk holds at most at once: they come first and leave last.

    With virtual stages the first stage takes as many micro-batches through a chunk as there are stages, then through its next.
    """
    if vpp == 1:
        return min(micro_batches, pp)
    passes = -(-micro_batches // pp) * pp * vpp
    begun = min(passes, (pp - 1) * 2 + (vpp - 1) * pp)  # before the first backward pass
    held = most = 0
    for number in range(passes + begun):
        if number < passes and number % (pp * vpp) < pp:
            held += 1
            most = max(most, held)
        ended = number - begun
        if ended >= 0 and ended % (pp * vpp) >= pp * (vpp - 1):
            held -= 1
    return most
