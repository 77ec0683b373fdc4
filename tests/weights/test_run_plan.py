"""What a run's SGLang arguments make of its engines, and those that put weights where plans do not know."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.errors import ConfigError
from megarl.weights.run_plan import engine_target
from megarl.weights.sglang_targets import EngineTarget


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ({}, EngineTarget(tp=8)),
        ({"dp_size": 1, "pp_size": 1, "dcp_size": 1, "moe_a2a_backend": "none", "enable_eplb": False}, EngineTarget(tp=8)),
        ({"ep_size": 4, "speculative_algorithm": "EAGLE"}, EngineTarget(tp=8, ep=4)),  # drafts keep their weights
        ({"ep_size": 8, "dp_size": 2, "enable_dp_attention": True}, EngineTarget(tp=4, ep=8, dp=2)),
    ],
)
def test_engines_are_what_their_arguments_say(arguments: dict[str, Any], target: EngineTarget) -> None:
    assert engine_target(8, arguments) == target


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dp_size", 2),
        ("enable_dp_lm_head", True),
        ("enable_eplb", True),
        ("ep_num_redundant_experts", 1),
        ("moe_dense_tp_size", 1),  # the dense layers' weights are then whole on every rank
        ("moe_a2a_backend", "deepep"),
        ("dcp_size", 2),
    ],
)
def test_what_puts_weights_elsewhere_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"rollout\.engine_args\.{name} is .*where the engine's weights lie then is not known"
    ):
        engine_target(8, {name: value})
