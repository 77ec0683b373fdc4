"""Corrections for the engine's log-probs against plain Python in float64, and whose denominators change.

Formulas and sources: docs/methods.md#rollout-correction.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algorithms import CORRECTIONS, Correction, correction, mismatch_sums, token_weights
from megarl.errors import ConfigError

LOW, HIGH = 0.8, 1.3
B, T = 12, 9


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Old and rollout log-probs, NaN outside a mask with holes and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=generator) < 0.7
    mask[:, 0] = True
    mask[5] = False
    old = -torch.rand(B, T, generator=generator, dtype=torch.float64) * 3
    scale = torch.linspace(0.01, 1.5, B, dtype=torch.float64)[:, None]
    rollout = old + scale * torch.randn(B, T, generator=generator, dtype=torch.float64)
    return old.masked_fill(~mask, float("nan")), rollout.masked_fill(~mask, float("nan")), mask


def plain(mode: str, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, kept mask and changed tokens with loops over responses and tokens."""
    weights, kept, changed = torch.zeros(B, T, dtype=torch.float64), mask.clone(), torch.zeros(B, T, dtype=torch.bool)
    for i in range(B):
        places = [t for t in range(T) if mask[i, t]]
        gaps = [float(old[i, t] - rollout[i, t]) for t in places]
        for t, gap in zip(places, gaps, strict=True):
            ratio = math.exp(gap if mode.endswith("token") else sum(gaps))
            if mode in ("mask_sequence", "reject_sequence"):
                ratio = math.prod(math.exp(g) for g in gaps) ** (1 / len(gaps))
            outside = not LOW <= ratio <= HIGH
            if mode.startswith("tis"):
                changed[i, t] = outside
                weights[i, t] = min(max(ratio, LOW), HIGH)
            elif mode.startswith("mis"):
                changed[i, t] = outside
                weights[i, t] = 0.0 if outside else ratio
            else:
                changed[i, t] = outside
                weights[i, t] = 0.0 if outside else 1.0
                kept[i, t] = not outside or mode == "mask_sequence"
    return weights, kept, changed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", CORRECTIONS)
def test_every_correction_is_its_formula(mode: str, seed: int) -> None:
    old, rollout, mask = batch(seed)
    weights, kept, statistics = correction(old, rollout, mask, [Correction(mode, LOW, HIGH)])
    want, want_kept, changed = plain(mode, old, rollout, mask)
    torch.testing.assert_close(weights, want, rtol=1e-12, atol=1e-14)
    assert torch.equal(kept, want_kept)
    assert statistics["weight_mean"] == pytest.approx(want.sum().item() / mask.sum().item(), rel=1e-12)
    assert statistics["changed_tokens"] == pytest.approx(changed.sum().item() / mask.sum().item())
    assert statistics["changed_responses"] == pytest.approx(changed.any(1).sum().item() / (B - 1))
    assert 0 < statistics["changed_tokens"] < 1


def test_importance_weights_divide_rollout_into_old_and_not_the_other_way_round() -> None:
    """Over a whole vocabulary, E_rollout[w·f] is E_old[f]; with the ratio upside down it is not."""
    generator = torch.Generator().manual_seed(3)
    old, rollout = torch.randn(2, 8, generator=generator, dtype=torch.float64).log_softmax(-1)
    f = torch.randn(8, generator=generator, dtype=torch.float64)
    one = torch.ones(8, 1, dtype=torch.bool)
    weights, _, _ = correction(old[:, None], rollout[:, None], one, [Correction("tis_token", 0.0, 1e9)])
    want = (old.exp() * f).sum()
    torch.testing.assert_close((rollout.exp() * weights[:, 0] * f).sum(), want, rtol=1e-12, atol=1e-14)
    upside_down, _, _ = correction(rollout[:, None], old[:, None], one, [Correction("tis_token", 0.0, 1e9)])
    assert abs((rollout.exp() * upside_down[:, 0] * f).sum() - want) > 1e-3


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_only_rejection_changes_denominators(mode: str) -> None:
    old, rollout, mask = batch()
    _, kept, _ = correction(old, rollout, mask, [Correction(mode, LOW, HIGH)])
    same = torch.equal(token_weights(kept, "token_mean"), token_weights(mask, "token_mean"))
    assert same is (mode != "reject_sequence")
    assert bool((kept.any(1) == (kept == mask).all(1))[mask.any(1)].all())  # whole responses or nothing


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_where_engine_and_trainer_agree_every_token_weighs_one(mode: str) -> None:
    old, _, mask = batch()
    weights, kept, statistics = correction(old, old, mask, [Correction(mode, LOW, HIGH)])
    assert torch.equal(weights, mask.double())
    assert torch.equal(kept, mask)
    assert statistics == {"weight_mean": 1.0, "changed_tokens": 0.0, "changed_responses": 0.0}


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_ratio_beyond_float32_is_bounded_and_not_nan(mode: str) -> None:
    old, rollout = torch.tensor([[-1.0, -200.0, -1.0]]), torch.tensor([[-200.0, -1.0, -1.0]])
    weights, _, _ = correction(old, rollout, torch.ones(1, 3, dtype=torch.bool), [Correction(mode, LOW, HIGH)])
    assert weights.dtype == torch.float32
    assert bool((weights >= 0).all() and (weights <= 1.3 + 1e-6).all())


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_batch_in_which_nothing_was_sampled_is_all_zero(mode: str) -> None:
    old, rollout, mask = batch()
    weights, kept, statistics = correction(old, rollout, torch.zeros_like(mask), [Correction(mode, LOW, HIGH)])
    assert not weights.any()
    assert not kept.any()
    assert set(statistics.values()) == {0.0}


@pytest.mark.parametrize(
    ("mode", "low", "high", "sentence"),
    [("tis_tokn", 0, 2, "did you mean 'tis_token'"), ("mis_token", 2, 1, r"\[2, 1\]"), ("reject_sequence", -1, 2, r"\[-1, 2\]"),
     ("tis_token", 0.5, 0.0, "bounded by"), ("mask_sequence", 1.0, 1.0, r"\[1.0, 1.0\]")],
)  # fmt: skip
def test_what_cannot_correct_is_one_sentence(mode: str, low: float, high: float, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        correction(*batch(), [Correction(mode, low, high)])


def test_corrections_combine_to_the_product_of_weights_and_the_meet_of_masks() -> None:
    """A token's weight with a mask and a rejection of whole responses, each computed from all sampled tokens."""
    data = batch(1)
    steps = [Correction("tis_token", LOW, HIGH), Correction("mask_sequence", 0.7, 1.6), Correction("reject_sequence", 0.9, 1.1)]
    weights, kept, statistics = correction(*data, steps)
    parts = [correction(*data, [step]) for step in steps]
    torch.testing.assert_close(weights, parts[0][0] * parts[1][0] * parts[2][0], rtol=1e-14, atol=0)
    assert torch.equal(kept, parts[2][1])
    assert not torch.equal(kept, data[2])
    changed = (parts[0][0] != 1) & data[2] & ((parts[0][0] == LOW) | (parts[0][0] == HIGH))
    changed |= data[2] & ((parts[1][0] == 0) | (parts[2][0] == 0))
    assert statistics["changed_tokens"] == pytest.approx(changed.sum().item() / data[2].sum().item())


@pytest.mark.parametrize("mode", ["tis_token", "mis_token", "tis_sequence", "mis_sequence"])
def test_normalised_weights_have_a_mean_of_one_over_tokens_or_responses(mode: str) -> None:
    data = batch(2)
    raw, _, _ = correction(*data, [Correction(mode, LOW, HIGH)])
    weights, kept, _ = correction(*data, [Correction(mode, LOW, HIGH, normalise=True)])
    rows = [[float(raw[i, t]) for t in range(T) if data[2][i, t]] for i in range(B)]
    units = [row[0] for row in rows if row] if mode.endswith("sequence") else [x for row in rows for x in row]
    torch.testing.assert_close(weights, raw / (sum(units) / len(units)), rtol=1e-12, atol=1e-14)
    assert torch.equal(kept, data[2])
    assert sum(units) / len(units) != pytest.approx(1, abs=1e-3)


def test_no_correction_at_all_is_a_weight_of_one() -> None:
    old, rollout, mask = batch()
    weights, kept, statistics = correction(old, rollout, mask, [])
    assert torch.equal(weights, mask.double())
    assert torch.equal(kept, mask)
    assert statistics["weight_mean"] == 1


def test_mismatch_is_the_sums_and_the_greatest_over_the_sampled_tokens() -> None:
    old, rollout, mask = batch()
    gaps = [float(old[i, t] - rollout[i, t]) for i in range(B) for t in range(T) if mask[i, t]]
    got = mismatch_sums(old[mask], rollout[mask])
    assert got["log_prob_abs"] == pytest.approx(sum(map(abs, gaps)), rel=1e-12)
    assert got["log_prob_max"] == pytest.approx(max(map(abs, gaps)), rel=1e-12)
    assert got["k3"] == pytest.approx(sum(math.exp(g) - g - 1 for g in gaps), rel=1e-10)
    assert set(mismatch_sums(old[:0, 0], rollout[:0, 0]).values()) == {0.0}
