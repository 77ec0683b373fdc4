"""The weight of the entropy bonus follows Skywork-OR1's rule, within its bounds, and continues from a checkpoint."""

from __future__ import annotations

from megarl.algorithms import AdaptiveEntropy


def test_the_bonus_is_given_at_or_below_the_target_and_its_weight_moves_by_delta() -> None:
    """c_{k+1} = c_k + Δ at or below the target, else c_k − Δ; the weight of a step is c_k·1{e_k ≤ target}."""
    entropies = [0.9, 0.5, 0.4, 0.4, 0.3, 0.6, 0.2, 0.7, 0.7, 0.7, 0.7, 0.7, 0.1, 0.1]
    controller = AdaptiveEntropy(0.25, target=0.5, delta=0.125, max_coef=0.5)
    c, weights, states = 0.25, [], []
    for entropy in entropies:
        weights.append(c if entropy <= 0.5 else 0.0)
        c = min(c + 0.125, 0.5) if entropy <= 0.5 else max(c - 0.125, 0.0)
        states.append(c)
    found = [(controller.update(entropy), controller.coef) for entropy in entropies]
    assert found == list(zip(weights, states, strict=True))
    assert {0.0, 0.5} <= set(states)
    assert found[2] == (0.25, 0.375)  # by hand: 0.25 - 0.125 + 0.125 before it


def test_it_continues_bit_for_bit_from_its_state() -> None:
    first, resumed = (AdaptiveEntropy(0.0, target=0.5, delta=0.005, max_coef=1.0) for _ in range(2))
    for _ in range(7):
        first.update(0.3)
    resumed.load_state_dict(first.state_dict())
    assert [resumed.update(e) for e in (0.4, 0.6, 0.2)] == [first.update(e) for e in (0.4, 0.6, 0.2)]
    assert resumed.coef == first.coef != 0.0
