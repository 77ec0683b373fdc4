"""Aggregation: every mode against plain sums, and independence of how a step is split into micro-batches.

Formulas and sources: docs/methods.md#aggregation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import AGGREGATIONS, POLICY_LOSSES, LossSettings, kl_per_token, token_weights
from megarl.errors import ConfigError
from tests.algorithms.batches import given_to

NORM_LENGTH = 11


def ragged(seed: int = 0, rows: int = 7, length: int = 9) -> tuple[Tensor, Tensor]:
    """A mask with holes (tool tokens), short rows and an empty row, and per-token losses that are NaN outside it."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=generator) < torch.rand(rows, 1, generator=generator)
    mask[0, :3] = True
    mask[-1] = False
    return mask, torch.randn(rows, length, generator=generator, dtype=torch.float64).masked_fill(~mask, float("nan"))


def plain(mode: str, mask: Tensor, loss: Tensor) -> float:
    """docs/methods.md#aggregation with loops over responses and tokens."""
    rows = [[x for x, m in zip(ls, ms, strict=True) if m] for ls, ms in zip(loss.tolist(), mask.tolist(), strict=True)]
    rows = [row for row in rows if row]
    if mode == "token_mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    per_response = {
        "seq_mean_token_mean": lambda row: sum(row) / len(row),
        "seq_mean_token_sum": sum,
        "seq_mean_token_sum_norm": lambda row: sum(row) / NORM_LENGTH,
    }[mode]
    return sum(per_response(row) for row in rows) / len(rows)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(5))
def test_every_mode_is_its_row_of_methods(mode: str, seed: int) -> None:
    mask, loss = ragged(seed)
    weights = token_weights(mask, mode, norm_length=NORM_LENGTH)
    assert weights.dtype == torch.float32
    assert bool((weights[~mask] == 0).all())
    got = (weights.double() * loss.nan_to_num()).sum().item()
    assert got == pytest.approx(plain(mode, mask, loss), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_response_without_sampled_tokens_counts_in_no_denominator(mode: str) -> None:
    mask, _ = ragged()
    kept = mask.any(1)
    torch.testing.assert_close(
        token_weights(mask, mode, norm_length=NORM_LENGTH)[kept],
        token_weights(mask[kept], mode, norm_length=NORM_LENGTH),
        rtol=0,
        atol=0,
    )
    assert not token_weights(torch.zeros_like(mask), mode, norm_length=NORM_LENGTH).any()


@pytest.mark.parametrize(
    ("mode", "norm_length", "sentence"),
    [("token_maen", 1, "did you mean 'token_mean'"), ("seq_mean_token_sum_norm", None, "norm_length is None"),
     ("seq_mean_token_sum_norm", 0, "norm_length is 0")],
)  # fmt: skip
def test_what_cannot_be_aggregated_is_one_sentence(mode: str, norm_length: int | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        token_weights(torch.ones(2, 2, dtype=torch.bool), mode, norm_length=norm_length)


def step_gradient(parts: list[list[int]], mode: str, loss_name: str, data: dict[str, Any]) -> tuple[float, Tensor]:
    """Loss and gradient of one optimizer step, accumulated over `parts`, each a micro-batch of whole responses."""
    logits = data["logits"].clone().requires_grad_()
    weights = token_weights(data["mask"], mode, norm_length=NORM_LENGTH)
    total = 0.0
    for rows in parts:
        mask = data["mask"][rows]
        response = torch.arange(len(rows))[:, None].expand_as(mask)[mask]
        new, old = logits[rows].log_softmax(-1)[..., 0][mask], data["old"][rows][mask]
        more = dict.fromkeys(given_to(loss_name, 0), data["chosen"][rows][mask])
        per_token, _ = POLICY_LOSSES.resolve(loss_name)(
            new, old, data["advantages"][rows][mask], response=response, settings=LossSettings(), **more
        )
        loss = (weights[rows][mask] * (per_token + 0.1 * kl_per_token(new, old, "k3"))).sum()
        loss.backward()
        total += loss.item()
    assert logits.grad is not None
    return total, logits.grad


@pytest.mark.parametrize("loss_name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=15, deadline=None)
@given(assignment=st.lists(st.integers(0, 3), min_size=7, max_size=7), order=st.permutations(range(7)), seed=st.integers(0, 99))
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(
    mode: str, loss_name: str, assignment: list[int], order: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, _ = ragged(seed)
    logits = torch.randn(7, 9, 3, generator=generator, dtype=torch.float64)
    data = {
        "mask": mask,
        "logits": logits,
        "old": logits.log_softmax(-1)[..., 0] + 0.3 * torch.randn(7, 9, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(7, 1, generator=generator, dtype=torch.float64).expand(7, 9),
        "chosen": (torch.rand(7, 9, generator=generator) < 0.3).double(),
    }
    parts = [[row for row in order if assignment[row] == part] for part in range(4)]
    total, gradient = step_gradient(parts, mode, loss_name, data)
    want_total, want_gradient = step_gradient([list(range(7))], mode, loss_name, data)
    assert total == pytest.approx(want_total, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-11, atol=1e-15)
