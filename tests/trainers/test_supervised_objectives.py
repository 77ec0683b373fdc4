"""What the losses of given responses read of a stream."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algorithms.preference import PREFERENCE_LOSSES, PreferenceSettings
from megarl.experience.pairs import sides
from megarl.trainers.supervised.objectives import (
    BcoObjective,
    KtoObjective,
    PairObjective,
    RewardModelObjective,
    SupervisedObjective,
)


def test_sides_of_a_pair_are_found_in_whatever_order_they_come() -> None:
    pair, is_chosen = [70_001.0, 3.0, 70_000.0, 3.0, 70_001.0, 70_000.0], [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    lengths = torch.tensor([2, 1, 3, 1, 2, 4])
    columns = {"pair": pair, "is_chosen": is_chosen}
    stream: Any = SimpleNamespace(
        lengths=lengths, columns={name: torch.tensor(values).repeat_interleave(lengths) for name, values in columns.items()}
    )
    chosen, rejected = sides(stream)
    assert chosen.tolist() == [1, 2, 4]
    assert rejected.tolist() == [3, 5, 0]


def test_a_pairs_margin_is_subtracted_from_its_own_scores() -> None:
    scores = torch.tensor([[0.3], [1.1], [-0.4], [0.9]], dtype=torch.float64)
    columns = {"pair": [7.0, 5.0, 5.0, 7.0], "is_chosen": [1.0, 0.0, 1.0, 0.0], "margin": [0.5, 2.0, 2.0, 0.5]}
    stream: Any = SimpleNamespace(
        lengths=torch.ones(4, dtype=torch.long), columns={name: torch.tensor(values) for name, values in columns.items()}
    )
    loss, _ = RewardModelObjective(2)(scores, stream)
    gaps = [0.3 - 0.9 - 0.5, -0.4 - 1.1 - 2.0]
    assert float(loss) == pytest.approx(sum(math.log1p(math.exp(-gap)) for gap in gaps) / 2, rel=1e-12)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_a_loss_without_a_reference_needs_no_column_of_one(name: str) -> None:
    lengths = torch.tensor([2, 3])
    log_probs = -torch.tensor([0.3, 0.9, 1.2, 0.1, 0.4], dtype=torch.float64)
    columns = {"pair": torch.zeros(5), "is_chosen": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])}
    response = torch.tensor([0, 0, 1, 1, 1])
    stream: Any = SimpleNamespace(lengths=lengths, columns=columns, owners=[0, 1], response=response)
    output, settings = torch.stack([log_probs, log_probs], dim=1), PreferenceSettings(beta=2.0)
    loss, figures = PairObjective(name, settings, 1, has_reference=False)(output, stream)
    zero = torch.zeros(1)
    want, _ = PREFERENCE_LOSSES.resolve(name)(
        log_probs[2:].sum()[None], log_probs[:2].sum()[None], zero, zero,
        chosen_tokens=lengths[1:], rejected_tokens=lengths[:1], settings=settings,
    )  # fmt: skip
    assert float(loss) == pytest.approx(float(want), rel=1e-12)
    assert float(figures["chosen_reward"]) == pytest.approx(2.0 * float(log_probs[2:].mean()), rel=1e-6)
    with pytest.raises(KeyError, match="reference_log_probs"):
        PairObjective("dpo", settings, 1)(output, stream)


@pytest.mark.parametrize("objective", [KtoObjective(PreferenceSettings(), 5, 0.0), BcoObjective(PreferenceSettings(), 5)])
def test_a_labelled_response_that_has_not_moved_counts_half_whatever_its_label(objective: Any) -> None:
    now, before = torch.tensor([[-1.0, -1.0, -0.5, -2.0, -0.5], [-1.0, -1.0, -1.0, -1.0, -1.0]])
    columns = {"labels": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]), "reference_log_probs": before}
    stream: Any = SimpleNamespace(
        lengths=torch.ones(5, dtype=torch.long), columns=columns, owners=[*range(5)], response=torch.arange(5)
    )
    _, figures = objective(torch.stack([now, now], dim=1), stream)
    assert float(figures["accuracy"]) == pytest.approx((0.5 + 0.5 + 1 + 1 + 0) / 5)


@pytest.mark.parametrize("dft", [False, True])
def test_tokens_of_given_responses_are_weighted_by_their_probability_under_dft_alone(dft: bool) -> None:
    log_probs = torch.tensor([-0.5, -2.0, -0.01], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    stream: Any = SimpleNamespace(columns={"weights": weights})
    loss, figures = SupervisedObjective(dft=dft)(torch.stack([log_probs, 0 * log_probs], dim=1), stream)
    loss.backward()
    shares = [w * (math.exp(x) if dft else 1.0) for w, x in zip(weights.tolist(), log_probs.tolist(), strict=True)]
    assert float(figures["loss"]) == pytest.approx(-sum(s * x for s, x in zip(shares, log_probs.tolist(), strict=True)))
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-share for share in shares])
