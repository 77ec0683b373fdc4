"""Preference losses against plain Python in float64: values, sums, and what each setting changes.

Formulas and sources: docs/methods.md#objectives.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.preference import (
    PREFERENCE_LOSSES,
    PreferenceSettings,
    bco,
    kto,
    kto_kl_reference,
    mismatched_rows,
    share_above,
)

P = 12
SETTINGS = PreferenceSettings(
    beta=0.3,
    label_smoothing=0.1,
    desirable_weight=1.5,
    undesirable_weight=0.7,
    reward_shift=0.4,
    mixture={"sft": 1.3, "ipo": 0.8, "bco_pair": 0.2},
)


def pairs(seed: int = 0) -> dict[str, Tensor]:
    """Sums of log-probs of P pairs whose responses differ in length."""
    generator = torch.Generator().manual_seed(seed)
    chosen_tokens, rejected_tokens = torch.randint(1, 30, (2, P), generator=generator)
    ref_chosen, ref_rejected = -torch.rand(2, P, generator=generator, dtype=torch.float64) * 40
    noise = 3 * torch.randn(2, P, generator=generator, dtype=torch.float64)
    return {
        "chosen": ref_chosen + noise[0],
        "rejected": ref_rejected + noise[1],
        "ref_chosen": ref_chosen,
        "ref_rejected": ref_rejected,
        "chosen_tokens": chosen_tokens,
        "rejected_tokens": rejected_tokens,
    }


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def plain(name: str, data: dict[str, Tensor], s: PreferenceSettings) -> list[tuple[float, float, float]]:
    """Loss, chosen reward and rejected reward of each pair."""
    rows = []
    for row in zip(*(values.tolist() for values in data.values()), strict=True):
        logp_w, logp_l, ref_w, ref_l, n_w, n_l = row
        h_w, h_l = logp_w - ref_w, logp_l - ref_l
        if name in ("simpo", "orpo"):
            h_w, h_l = logp_w / n_w, logp_l / n_l
        elif s.length_normalised:
            h_w, h_l = h_w / n_w, h_l / n_l
        if name == "simpo":
            loss = -math.log(sigmoid(s.beta * h_w - s.beta * h_l - s.target_margin))
        elif name == "orpo":
            odds_w, odds_l = (math.exp(m) / (1 - math.exp(m)) for m in (min(h_w, -1e-6), min(h_l, -1e-6)))
            rows.append((-h_w - s.beta * math.log(odds_w / odds_l / (1 + odds_w / odds_l)), s.beta * h_w, s.beta * h_l))
            continue
        elif name == "robust_dpo":
            right, swapped = (-math.log(sigmoid(sign * s.beta * (h_w - h_l))) for sign in (1, -1))
            loss = ((1 - s.label_smoothing) * right - s.label_smoothing * swapped) / (1 - 2 * s.label_smoothing)
        elif name == "apo_zero":
            loss = 1 - sigmoid(s.beta * h_w) + sigmoid(s.beta * h_l)
        elif name == "apo_down":
            loss = sigmoid(s.beta * h_w) + 1 - sigmoid(s.beta * (h_w - h_l))
        elif name == "bco_pair":
            loss = -math.log(sigmoid(s.beta * h_w - s.reward_shift)) - math.log(sigmoid(-(s.beta * h_l - s.reward_shift)))
        elif name == "mixture":
            loss = 0.8 * (h_w - h_l - 1 / (2 * s.beta)) ** 2 - 1.3 * logp_w / n_w
            loss -= 0.2 * math.log(sigmoid(s.beta * h_w - s.reward_shift))
            loss -= 0.2 * math.log(sigmoid(-(s.beta * h_l - s.reward_shift)))
        elif name == "ipo":
            loss = (h_w - h_l - 1 / (2 * s.beta)) ** 2
        else:
            smoothing = s.label_smoothing if name == "cdpo" else 0.0
            loss = -(1 - smoothing) * math.log(sigmoid(s.beta * (h_w - h_l)))
            loss += -smoothing * math.log(sigmoid(-s.beta * (h_w - h_l)))
        times = 0.8 + 0.2 if name == "mixture" else 1.0  # the config lets no mixture have it
        rows.append((loss + times * s.rpo_alpha * -logp_w / n_w, s.beta * h_w, s.beta * h_l))
    return rows


@pytest.mark.parametrize("changes", [{}, {"length_normalised": True}, {"rpo_alpha": 0.4}, {"label_smoothing": 0.0}])
@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_every_loss_is_its_row_of_methods(name: str, changes: dict[str, Any]) -> None:
    settings = dataclasses.replace(SETTINGS, **changes)
    data = pairs()
    loss, sums = PREFERENCE_LOSSES.resolve(name)(**data, settings=settings)
    want = plain(name, data, settings)
    rtol = 1e-9 if name == "orpo" else 1e-12  # 1 − e^m of the reference cancels where m is nearly 0
    torch.testing.assert_close(loss, torch.tensor([row[0] for row in want], dtype=torch.float64), rtol=rtol, atol=1e-13)
    assert sums["accuracy"].item() == sum(good > bad for _, good, bad in want) not in (0, P)
    assert sums["chosen_reward"].item() == pytest.approx(sum(good for _, good, _ in want), rel=1e-5)
    assert sums["rejected_reward"].item() == pytest.approx(sum(bad for _, _, bad in want), rel=1e-5)
    assert sums["margin"].item() == pytest.approx(sum(good - bad for _, good, bad in want), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "acts"),
    [
        ("dpo", {"label_smoothing": 0.3}, False),
        ("cdpo", {"label_smoothing": 0.3}, True),
        *((name, {"length_normalised": True}, name not in ("simpo", "orpo")) for name in PREFERENCE_LOSSES),
        *((name, {"reward_shift": -1.0}, name in ("bco_pair", "mixture")) for name in PREFERENCE_LOSSES),
        *((name, {"mixture": {"dpo": 1.0}}, name == "mixture") for name in PREFERENCE_LOSSES),
        ("robust_dpo", {"label_smoothing": 0.3}, True),
        ("simpo", {"target_margin": 1.0}, True),
        ("dpo", {"target_margin": 1.0}, False),
        *((name, {"rpo_alpha": 1.0}, name != "orpo") for name in PREFERENCE_LOSSES),
        *((name, {"beta": 0.1}, True) for name in PREFERENCE_LOSSES),
    ],
)
def test_a_setting_acts_where_its_docstring_says(name: str, changes: dict[str, Any], acts: bool) -> None:
    data, loss = pairs(), PREFERENCE_LOSSES.resolve(name)
    before, _ = loss(**data, settings=SETTINGS)
    after, _ = loss(**data, settings=dataclasses.replace(SETTINGS, **changes))
    assert bool((before != after).any()) is acts


def test_at_the_reference_dpo_is_log_two_and_ipo_its_target_squared() -> None:
    data = pairs()
    data |= {"chosen": data["ref_chosen"], "rejected": data["ref_rejected"]}
    for name, want in (("dpo", math.log(2)), ("cdpo", math.log(2)), ("robust_dpo", math.log(2)), ("ipo", (1 / 0.6) ** 2)):
        loss, sums = PREFERENCE_LOSSES.resolve(name)(**data, settings=SETTINGS)
        torch.testing.assert_close(loss, torch.full((P,), want, dtype=torch.float64))
        assert (sums["accuracy"].item(), sums["margin"].item()) == (P / 2, 0)


def test_equal_scores_count_half_in_an_accuracy_and_what_is_no_number_not_at_all() -> None:
    nan, inf = math.nan, math.inf
    first, second = torch.tensor([[2.0, 1.0, 1.0, nan, nan, inf, -inf, 0.0], [1.0, 2.0, 1.0, 0.0, nan, inf, inf, -0.0]])
    assert share_above(first, second).tolist() == [1.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.5]


def test_a_mixture_is_the_weighted_sum_of_its_losses_and_gradients_and_tells_each() -> None:
    """MPO (arXiv 2411.10442) with its published weights."""
    data, settings = pairs(), dataclasses.replace(SETTINGS, mixture={"dpo": 0.8, "bco_pair": 0.2, "sft": 1.0})
    both = torch.stack([data["chosen"], data["rejected"]]).requires_grad_()
    data |= {"chosen": both[0], "rejected": both[1]}
    loss, sums = PREFERENCE_LOSSES.resolve("mixture")(**data, settings=settings)
    (gradient,) = torch.autograd.grad(loss.sum(), both)
    dpo, of_dpo = PREFERENCE_LOSSES.resolve("dpo")(**data, settings=settings)
    bco_pair, of_bco = PREFERENCE_LOSSES.resolve("bco_pair")(**data, settings=settings)
    sft = -data["chosen"] / data["chosen_tokens"]
    want = 0.8 * dpo + 0.2 * bco_pair + sft
    torch.testing.assert_close(loss, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), both)[0], rtol=1e-13, atol=1e-15)
    parts = {"dpo_loss": dpo, "bco_pair_loss": bco_pair, "sft_loss": sft}
    assert sums == of_dpo | {"reward": of_bco["reward"]} | {name: part.detach().sum() for name, part in parts.items()}
    assert not any(value.requires_grad for value in sums.values())


def test_bco_of_labelled_responses_is_its_row_of_methods() -> None:
    data = pairs()
    log_probs = torch.cat([data["chosen"], data["rejected"]])
    reference = torch.cat([data["ref_chosen"], data["ref_rejected"]])
    desirable = torch.arange(2 * P) % 3 == 0
    loss, sums = bco(log_probs, reference, desirable, SETTINGS)
    rewards = [0.3 * (logp - ref) for logp, ref in zip(log_probs.tolist(), reference.tolist(), strict=True)]
    want = [-math.log(sigmoid((reward - 0.4) * (1 if good else -1))) for reward, good in zip(rewards, desirable, strict=True)]
    torch.testing.assert_close(loss, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-13)
    assert sums["desirable"].item() == 8
    assert sums["desirable_reward"].item() == pytest.approx(sum(rewards[0::3]), rel=1e-5)
    assert sums["reward"].item() == pytest.approx(sum(rewards), rel=1e-5)


def test_bco_of_a_pair_is_bco_of_its_two_responses() -> None:
    data = pairs()
    pair, sums = PREFERENCE_LOSSES.resolve("bco_pair")(**data, settings=SETTINGS)
    good, of_good = bco(data["chosen"], data["ref_chosen"], torch.ones(P, dtype=torch.bool), SETTINGS)
    bad, of_bad = bco(data["rejected"], data["ref_rejected"], torch.zeros(P, dtype=torch.bool), SETTINGS)
    torch.testing.assert_close(pair, good + bad, rtol=1e-14, atol=0)
    assert sums["reward"].item() == pytest.approx((of_good["reward"] + of_bad["reward"]).item() / 2, rel=1e-6)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_a_loss_without_a_reference_reads_none(name: str) -> None:
    data, nothing = pairs(), torch.full((P,), float("nan"), dtype=torch.float64)
    loss, sums = PREFERENCE_LOSSES.resolve(name)(**data, settings=SETTINGS)
    blind, blind_sums = PREFERENCE_LOSSES.resolve(name)(
        **data | {"ref_chosen": nothing, "ref_rejected": nothing}, settings=SETTINGS
    )
    assert torch.equal(loss, blind)
    assert sums == blind_sums


def test_a_certain_response_has_finite_odds_and_gradients_in_orpo() -> None:
    """In float32 a short response may have probability 1, whose odds are infinite."""
    both = torch.tensor([[0.0, -1e-9, 0.0, -80.0], [-0.5, 0.0, 0.0, 0.0]], requires_grad=True)
    ones = torch.ones(4)
    loss, _ = PREFERENCE_LOSSES.resolve("orpo")(
        *both, ones, ones, chosen_tokens=ones, rejected_tokens=ones, settings=PreferenceSettings(beta=0.5)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), both)
    assert bool(loss.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert gradient[0, :3].tolist() == [-1.0] * 3  # of −m_w alone
    assert loss[2].item() == pytest.approx(0.5 * math.log(2))


def test_robust_dpos_mean_over_swapped_labels_is_dpo_of_the_true_ones() -> None:
    data, settings = pairs(), dataclasses.replace(SETTINGS, label_smoothing=0.3)
    swapped = {name: data[name.replace("chosen", "X").replace("rejected", "chosen").replace("X", "rejected")] for name in data}
    robust = PREFERENCE_LOSSES.resolve("robust_dpo")
    mean = 0.7 * robust(**data, settings=settings)[0] + 0.3 * robust(**swapped, settings=settings)[0]
    torch.testing.assert_close(mean, PREFERENCE_LOSSES.resolve("dpo")(**data, settings=settings)[0], rtol=1e-12, atol=1e-13)


def test_a_pair_that_is_hopelessly_wrong_has_a_finite_loss_and_gradient() -> None:
    chosen = torch.tensor([-2000.0], requires_grad=True)
    zero, one = torch.zeros(1), torch.ones(1)
    loss, _ = PREFERENCE_LOSSES.resolve("dpo")(
        chosen, zero, zero, zero, chosen_tokens=one, rejected_tokens=one, settings=PreferenceSettings(beta=1.0)
    )
    loss.sum().backward()
    assert loss.item() == pytest.approx(2000.0)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1.0)


def test_kto_is_its_row_of_methods() -> None:
    data = pairs()
    log_probs = torch.cat([data["chosen"], data["rejected"]])
    reference = torch.cat([data["ref_chosen"], data["ref_rejected"]])
    desirable = torch.arange(2 * P) % 3 == 0
    z = 0.8
    loss, sums = kto(log_probs, reference, desirable, torch.tensor(z, dtype=torch.float64), SETTINGS)
    want, rewards = [], {True: 0.0, False: 0.0}
    for logp, ref, good in zip(log_probs.tolist(), reference.tolist(), desirable.tolist(), strict=True):
        gap = 0.3 * (logp - ref - z)
        want.append(1.5 * (1 - sigmoid(gap)) if good else 0.7 * (1 - sigmoid(-gap)))
        rewards[good] += 0.3 * (logp - ref)
    torch.testing.assert_close(loss, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-13)
    assert sums["desirable"].item() == 8
    assert sums["desirable_reward"].item() == pytest.approx(rewards[True], rel=1e-5)
    assert sums["undesirable_reward"].item() == pytest.approx(rewards[False], rel=1e-5)


def test_ktos_reference_point_is_the_clamped_mean_log_ratio_without_gradient() -> None:
    data = pairs(1)
    policy, reference = data["chosen"].requires_grad_(), data["ref_chosen"]
    ratios = [a - b for a, b in zip(policy.tolist(), reference.tolist(), strict=True)]
    for sign in (1, -1):
        z = kto_kl_reference(sign * policy, sign * reference)
        assert z.item() == pytest.approx(max(0.0, sign * sum(ratios) / P), rel=1e-12)
        assert not z.requires_grad
    assert sum(ratios) != 0
    with pytest.raises(ValueError, match="at least one mismatched pair"):
        kto_kl_reference(torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize(
    "prompts",
    ["abcdef", "aabbcc", "abab", "aaabbcd", "ab", "baab", "aabcc"],
)
def test_a_mismatched_row_answers_another_prompt_and_each_is_taken_once(prompts: str) -> None:
    others = mismatched_rows(prompts)
    assert sorted(others) == list(range(len(prompts)))
    assert all(prompts[other] != prompt for prompt, other in zip(prompts, others, strict=True))


def test_rows_that_cannot_be_mismatched_are_as_few_as_can_be() -> None:
    prompts = "aaaab"
    assert sum(prompts[other] != prompt for prompt, other in zip(prompts, mismatched_rows(prompts), strict=True)) == 2
    assert mismatched_rows("") == []


def test_no_gradient_reaches_ktos_reference_point() -> None:
    z = torch.tensor(0.5, requires_grad=True)
    policy = torch.zeros(3, requires_grad=True)
    loss, _ = kto(policy, torch.zeros(3), torch.tensor([True, False, True]), z, SETTINGS)
    loss.sum().backward()
    assert z.grad is None
    assert policy.grad is not None
