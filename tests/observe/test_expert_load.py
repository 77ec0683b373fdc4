"""Figures of routing from what layers routed, by hand, and the line of a step with several updates."""

from __future__ import annotations

import pytest

from megarl.observe.expert_load import LayerRouting, experts_line, routing_figures
from megarl.runs.update_metrics import combine

EVEN = LayerRouting(2, 8.0, (4.0, 4.0, 4.0, 4.0), (2.0, 2.0, 2.0, 2.0), 8 * 1.2)
SKEWED = LayerRouting(2, 8.0, (8.0, 6.0, 0.0, 2.0), (5.0, 1.0, 1.0, 1.0), 8 * 0.4, 8 * 3.0, 1.7, 0.5)


def test_figures_are_means_over_layers_and_the_worst() -> None:
    figures = routing_figures({0: EVEN, 3: SKEWED})
    skewed = 4 * (8 / 16 * 5 / 8 + 6 / 16 * 1 / 8 + 2 / 16 * 1 / 8)
    assert figures == pytest.approx(
        {
            "expert_imbalance": (1 + 2) / 2,
            "expert_imbalance_max": 2.0,
            "idle_experts": 1 / 8,
            "router_entropy": 0.8,
            "balance_loss": (1 + skewed) / 2,
            "router_z_loss": 1.5,
            "sequence_balance_loss": 0.85,
            "expert_bias_spread": 0.25,
        }
    )
    assert {"router_z_loss", "dropped_choices"}.isdisjoint(routing_figures({0: EVEN}))


def test_stages_are_joined_and_the_rest_is_as_before() -> None:
    found = combine([{"tokens": 2.0, "kl": 4.0, "experts": {3: SKEWED}}, {"experts": {0: EVEN}}])
    assert found["kl"] == 2.0
    assert found["experts"] == {3: SKEWED, 0: EVEN}
    assert found["expert_imbalance"] == 1.5
    assert "experts" not in combine([{"tokens": 2.0, "kl": 4.0}])


def test_the_updates_of_a_step_are_one_line() -> None:
    line = experts_line([{3: SKEWED, 0: EVEN}, {0: EVEN, 3: EVEN}])
    assert line == {
        "layers": [0, 3],
        "loads": [[1.0, 1.0, 1.0, 1.0], [1.5, 1.25, 0.5, 0.75]],
        "entropy": [1.2, 0.8],
    }
