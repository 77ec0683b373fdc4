"""What the log-prob head has alive at once for 32,768 tokens and a vocabulary of 131,072, counted without values."""

from __future__ import annotations

import pytest
import torch

from benchmarks.head_memory import (
    HIDDEN_SIZES,
    TOKENS,
    VOCABULARY,
    inputs,
    liger_bytes,
    on_cpu,
    on_cpu_in_full,
    on_gpu,
    run,
    shares,
)
from benchmarks.live_bytes import LiveBytes
from benchmarks.log_probs import HEADS
from tests.algorithms.test_memory import peak_bytes

SHARE = 0.04
"""Of all logits in float32, the most that a head may have alive forward and backward."""


@pytest.mark.parametrize("name", ["megarl", "apart", "full"])
def test_bytes_on_tensors_without_values_are_those_that_torchs_allocator_gives(name: str) -> None:
    tokens, vocab, hidden = 96, 16384, 64
    seen: list[int] = []
    for _ in range(2):
        given = inputs(tokens, vocab, hidden, torch.float32, "cpu")
        if name == "megarl":
            given[1].main_grad = torch.zeros(vocab, hidden)  # type: ignore[attr-defined]
        if not seen:
            with LiveBytes() as counted:
                run(HEADS[name], *given, 1024)
            seen.append(counted.peak)
        else:
            seen.append(peak_bytes(lambda given=given: run(HEADS[name], *given, 1024)))  # type: ignore[misc]
    assert seen[0] == seen[1] == on_cpu(name, tokens, vocab, hidden)


def test_a_cpu_holds_less_than_a_twenty_fifth_of_the_logits() -> None:
    """Forward and backward, gradients of hidden states and all."""
    assert 0.004 < shares(on_cpu_in_full("megarl", 1024))["of float32 logits"] < SHARE


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_a_gpu_holds_less_than_a_twenty_fifth_of_the_logits(hidden: int) -> None:
    assert 0.02 < shares(on_gpu(TOKENS, VOCABULARY, hidden))["of float32 logits"] < SHARE


def test_ligers_bytes_follow_its_own_choice_of_rows() -> None:
    """Its documentation's example: 16,384 tokens, a vocabulary of 32,000 and 4,096 wide, in chunks of 2,048."""
    assert liger_bytes(16384, 32000, 4096)["rows"] == 2048
    of_example = 2 * (2048 * 32000 + 16384 * 4096 + 32000 * 4096) + 4 * 16384
    assert liger_bytes(16384, 32000, 4096)["total"] == of_example
