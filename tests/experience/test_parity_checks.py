"""The gates of a run say whether they are passed, where that is known."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import Config, parse_config
from megarl.experience.parity_checks import ParityChecks, bounds
from megarl.observe.progress import gate_line

LOG_PROBS = {"log_prob_max_difference_as_loaded", "log_prob_max_difference_after_sync"}
KL = {"kl_to_reference_at_first_step"}


@pytest.mark.parametrize(
    ("section", "fields", "bounded"),
    [
        ("run", {}, KL | LOG_PROBS),
        ("model", {"dtype": "bfloat16"}, KL),
        ("reference", {"path": "another/model"}, LOG_PROBS),
        ("reference", {"path": "some/model"}, KL | LOG_PROBS),
        ("algorithm", {"kl": {"coef": 0.0}}, LOG_PROBS),
        ("rollout", {"schedule": {"mode": "async"}}, KL),
        ("rollout", {"schedule": {"over_sample": 2}}, KL),
        ("rollout", {"engine_args": {"quantization": "fp8"}}, KL),
        ("rollout", {"servers": {"model_path": "some/model-fp8"}}, KL),
    ],
)
def test_only_what_must_hold_has_a_bound(section: str, fields: dict[str, Any], bounded: set[str]) -> None:
    tree: dict[str, Any] = {
        "run": {"name": "x", "steps": 2},
        "model": {"path": "some/model", "dtype": "float32"},
        "algorithm": {"name": "grpo"},
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
        "rewards": [{"name": "exact_number"}],
    }
    tree[section] = tree.get(section, {}) | fields
    assert set(bounds(parse_config(tree))) == bounded


@pytest.mark.parametrize("has_reference", [True, False])
def test_a_run_without_a_reference_has_no_figure_of_one(has_reference: bool) -> None:
    checks = ParityChecks(has_reference=has_reference)
    checks.record(1, {"mismatch/log_prob_max": 1e-6}, {"kl/reference": 0.0}, synced=False)
    assert checks.figures().keys() == LOG_PROBS | (KL if has_reference else set())
    again = ParityChecks(has_reference=has_reference)
    again.load(checks.figures())
    assert again.figures() == checks.figures()


def config_of(**model: Any) -> Config:
    return parse_config(
        {
            "run": {"name": "x", "steps": 2},
            "model": {"path": "some/model", **model},
            "algorithm": {"name": "grpo"},
            "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
            "rewards": [{"name": "exact_number"}],
        }
    )


def test_in_bfloat16_the_bound_grows_with_the_root_of_a_dense_models_layers() -> None:
    config = config_of(dtype="bfloat16")
    assert {name: bounds(config, 30)[name] for name in LOG_PROBS} == dict.fromkeys(LOG_PROBS, 1.1)
    assert {name: bounds(config, 120)[name] for name in LOG_PROBS} == dict.fromkeys(LOG_PROBS, 2.19)
    assert not LOG_PROBS & bounds(config, None).keys()


def test_in_float32_the_bound_does_not_know_of_layers_and_in_int4_there_is_none() -> None:
    assert bounds(config_of(dtype="float32"), 30)["log_prob_max_difference_after_sync"] == 1e-3
    assert not LOG_PROBS & bounds(config_of(dtype="bfloat16", int4_experts=32), 30).keys()


def test_a_gate_says_that_it_is_passed_or_not() -> None:
    assert gate_line(3.456e-6, 1e-3) == "3.46e-06 (ok, at most 0.001)"
    assert gate_line(0.5, 1e-3) == "0.5 (NOT ok, at most 0.001)\n    see docs/run_that_does_not_learn.md"
    assert gate_line(float("nan"), 1e-3).startswith("nan (NOT ok")
    assert gate_line(0.03, None) == "0.03"
    assert gate_line(None, 1e-3) == "not measured"
