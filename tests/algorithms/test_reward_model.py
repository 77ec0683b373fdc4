"""Reward-model losses (docs/methods.md#objective-reward_model) against plain Python in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.reward_model import pairwise_reward_loss, process_reward_loss


@pytest.mark.parametrize("with_margin", [False, True])
def test_the_pairwise_loss_is_minus_the_log_sigmoid_of_the_difference_less_the_margin(with_margin: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    loss, sums = pairwise_reward_loss(chosen, rejected, margin.abs() if with_margin else None)
    margins = margin.abs().tolist() if with_margin else [0.0] * 20
    rows = list(zip(chosen.tolist(), rejected.tolist(), margins, strict=True))
    want = [-math.log(1 / (1 + math.exp(-(good - bad - m)))) for good, bad, m in rows]
    torch.testing.assert_close(loss, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert bool((loss > 0).all())  # a loss without its minus sign is negative
    assert sums["accuracy"].item() == sum(good > bad for good, bad, _ in rows)
    assert sums["chosen_score"].item() == pytest.approx(sum(chosen.tolist()), rel=1e-5)
    assert sums["rejected_score"].item() == pytest.approx(sum(rejected.tolist()), rel=1e-5)


def test_minimising_the_pairwise_loss_raises_the_chosen_score() -> None:
    chosen, rejected = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    pairwise_reward_loss(chosen, rejected)[0].sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == -0.5
    assert rejected.grad.item() == 0.5


def test_the_process_loss_is_the_binary_cross_entropy_of_each_step_with_soft_labels_too() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(30, generator=generator, dtype=torch.float64)
    labels = torch.rand(30, generator=generator, dtype=torch.float64)
    labels[:10], labels[10:20] = 0.0, 1.0
    loss, sums = process_reward_loss(scores, labels)
    want, right = [], 0
    for score, label in zip(scores.tolist(), labels.tolist(), strict=True):
        p = 1 / (1 + math.exp(-score))
        want.append(-(label * math.log(p) + (1 - label) * math.log(1 - p)))
        right += (p > 0.5) == (label > 0.5)
    torch.testing.assert_close(loss, torch.tensor(want, dtype=torch.float64), rtol=1e-11, atol=1e-13)
    assert sums["accuracy"].item() == right not in (0, 30)
    whole, _ = process_reward_loss(scores[:20], labels[:20].long())
    torch.testing.assert_close(whole, loss[:20])


def test_equal_scores_of_a_pair_and_a_step_that_is_on_neither_side_count_half() -> None:
    chosen, rejected = torch.tensor([[1.0, 0.0, 2.0, 3.0], [1.0, 0.0, 1.0, 4.0]])
    assert pairwise_reward_loss(chosen, rejected)[1]["accuracy"].item() == 0.5 + 0.5 + 1 + 0
    scores, labels = torch.tensor([0.0, 0.0, 1.0, -1.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0, 0.2, 0.5])
    assert process_reward_loss(scores, labels)[1]["accuracy"].item() == 0.5 + 0.5 + 1 + 1 + 0 + 0.5


@pytest.mark.parametrize("label", [-0.1, 1.5, float("nan")])
def test_a_label_that_is_no_probability_has_a_loss_that_is_no_number(label: float) -> None:
    loss, _ = process_reward_loss(torch.zeros(2), torch.tensor([1.0, label]))
    assert loss.isnan().tolist() == [False, True]


def test_no_pairs_and_no_steps_have_no_loss() -> None:
    empty = torch.zeros(0, requires_grad=True)
    for loss, sums in (pairwise_reward_loss(empty, empty), process_reward_loss(empty, torch.zeros(0))):
        assert loss.shape == (0,)
        assert all(value.item() == 0 and not value.requires_grad for value in sums.values())
