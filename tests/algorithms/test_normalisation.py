"""Normalisation of advantages against plain Python in float64: over tokens or responses, of the batch or a group.

Formulas and sources: docs/methods.md#normalisation.
"""

from __future__ import annotations

import statistics

import pytest
import torch

from megarl.algorithms import ADVANTAGES, AdvantageInputs, RunningMean
from megarl.algorithms.catalogue import ESTIMATORS, NORMALISATIONS
from tests.algorithms.batches import B, batch, dense, places, resolved, same

EPS = 0.01


def full(seed: int, **changes: object) -> AdvantageInputs:
    greedy = torch.linspace(-1, 1, B, dtype=torch.float64)
    inputs = batch(seed, penalty=True, baseline=RunningMean(3, 0.25), greedy_scores=greedy, eps=EPS, **changes)
    inputs.groups[4] = 999  # alone: dropped by those that compare
    return inputs


def plain(
    values: dict[int, list[float]], groups: list[int], mode: str, *, per_response: bool, unbiased: bool
) -> dict[int, list[float]]:
    """`values[row]` are the advantages of its tokens; the answer has the same form."""
    out = {}
    for row, own in values.items():
        peers = [other for other in values if mode.startswith("batch") or groups[other] == groups[row]]
        units = [x for other in peers for x in (values[other][:1] if per_response else values[other])]
        if mode.endswith("_rms"):
            mean, spread = 0.0, statistics.fmean(x * x for x in units) ** 0.5
        else:
            mean = statistics.fmean(units)
            spread = statistics.stdev(units) if unbiased and len(units) > 1 else statistics.pstdev(units)
        out[row] = [0.0 if spread == 0 else (x - mean) / (spread + EPS) for x in own]
    return out


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("mode", NORMALISATIONS[1:])
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_estimator_is_normalised_as_the_config_says(name: str, mode: str, unbiased: bool) -> None:
    inputs = full(1, unbiased=unbiased, normalisation="none")
    raw = resolved(name)(inputs)
    dropped = raw.dropped if raw.dropped is not None else torch.zeros(B, dtype=torch.bool)
    values = {i: [float(raw.advantages[i, t]) for t in places(inputs, i)] for i in range(B) if not dropped[i]}
    rows = plain(values, inputs.groups.tolist(), mode, per_response=ESTIMATORS[name].per_response, unbiased=unbiased)
    inputs.normalisation = mode
    got = resolved(name)(inputs)
    same(got.advantages, dense(inputs, {i: rows.get(i, [0.0] * len(places(inputs, i))) for i in range(B)}))
    if raw.returns is not None:
        assert got.returns is not None
        assert torch.equal(got.returns, raw.returns)


@pytest.mark.parametrize("mode", ["batch_rms", "group_rms"])
def test_scaling_without_a_shift_leaves_groups_of_equal_rewards_at_zero(mode: str) -> None:
    """The published `reinforce_plus_plus_baseline` moves them by the batch mean of its tokens."""
    inputs = batch(0, groups=torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    inputs.scores[:3] = 0.5
    advantages = ADVANTAGES.resolve("reinforce_plus_plus_baseline")(inputs).advantages
    assert bool((advantages[:3][inputs.mask[:3]] != 0).all())
    inputs.normalisation = mode
    advantages = ADVANTAGES.resolve("reinforce_plus_plus_baseline")(inputs).advantages
    assert not advantages[:3].any()
    assert advantages[3:].any()


def test_without_normalisation_grpo_is_dr_grpo_and_with_it_dr_grpo_is_grpo() -> None:
    inputs = batch(2)
    same(
        ADVANTAGES.resolve("dr_grpo")(batch(2, normalisation="group")).advantages, ADVANTAGES.resolve("grpo")(inputs).advantages
    )
    same(
        ADVANTAGES.resolve("grpo")(batch(2, normalisation="none")).advantages, ADVANTAGES.resolve("dr_grpo")(inputs).advantages
    )


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_the_size_of_ppos_step_does_not_grow_with_the_reward(scale: float) -> None:
    inputs = batch(3, penalty=True, eps=0.0)
    assert inputs.values is not None
    inputs.scores, inputs.token_penalty, inputs.values = (
        scale * inputs.scores,
        scale * inputs.token_penalty,
        scale * inputs.values,
    )
    advantages = ADVANTAGES.resolve("gae")(inputs).advantages[inputs.mask]
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-12)
    assert float(advantages.std()) == pytest.approx(1, rel=1e-12)
