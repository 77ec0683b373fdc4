"""Both kinds of config answer the same questions, by the sections they have; `load_any` tells the kinds apart once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import AnyConfig, Config, SupervisedConfig, load_any, parse_any
from megarl.config.yaml_tree import apply_overrides

RL: dict[str, Any] = {
    "model": {"path": "m"},
    "policy": {"layout": {"dp": 4}},
    "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 100},
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "max_new_tokens": 50, "engines": 2, "tp": 3},
    "algorithm": {"name": "ppo", "mini_batches": 2, "epochs": 3},
    "critic": {"init_from": "c", "layout": {"dp": 2}},
    "reference": {"layout": {"tp": 2, "sequence_parallel": False}},
    "reward_model": {"path": "r"},
}
GIVEN: dict[str, Any] = {
    "model": {"path": "m"},
    "policy": {"layout": {"dp": 2}},
    "objective": {"name": "dpo"},
    "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}, "rows_per_step": 8, "max_tokens": 101},
}


def parsed(tree: dict[str, Any], *overrides: str) -> AnyConfig:
    return parse_any(apply_overrides(tree, overrides))


def sizes(config: AnyConfig) -> list[tuple[str, int, int]]:
    """Name, tp and dp of each group of processes, in their order."""
    return [(name, layout.tp, layout.dp) for name, layout in config.layouts.items()]


def test_a_section_objective_decides_which_config_it_is(tmp_path: Path) -> None:
    assert isinstance(parsed(RL), Config)
    assert isinstance(parsed(GIVEN), SupervisedConfig)
    (tmp_path / "run.yaml").write_text("model: {path: m}\ndata: {train: {source: jsonl, path: rows.jsonl}}\n")
    assert isinstance(load_any(tmp_path / "run.yaml", ["objective.name=kto"]), SupervisedConfig)
    assert load_any(tmp_path / "run.yaml", default={"objective": {}}).trains_by == "sft"
    assert load_any(tmp_path / "run.yaml", ["objective.name=kto"], default={"objective": {}}).trains_by == "kto"


def test_the_roles_are_the_models_that_a_run_uses() -> None:
    roles = parsed(RL).roles
    assert [(r.name, r.folder, r.folder_field, r.trained is not None, r.value_head) for r in roles] == [
        ("policy", "m", "model.path", True, False),
        ("critic", "c", "critic.init_from", True, True),
        ("reference", "m", "reference.path", False, False),
        ("reward_model", "r", "reward_model.path", False, True),
    ]
    assert [role.name for role in parsed(RL, "algorithm.name=grpo", "algorithm.kl.coef=0.0").roles] == [
        "policy",
        "reward_model",
    ]
    assert [role.name for role in parsed(GIVEN).roles] == ["policy", "reference"]
    scorer = parsed(GIVEN, "objective.name=reward_model").roles
    assert [(role.name, role.value_head) for role in scorer] == [("policy", True)]


def test_layouts_are_those_of_roles_with_processes_of_their_own() -> None:
    # the reward model shares the policy's
    assert sizes(parsed(RL)) == [("policy", 1, 4), ("critic", 1, 2), ("reference", 2, 1)]
    assert sizes(parsed(GIVEN)) == [("policy", 1, 2)]
    assert sizes(parsed(GIVEN, "reference.layout={dp: 2}")) == [("policy", 1, 2), ("reference", 1, 2)]


@pytest.mark.parametrize(
    ("question", "of_rl", "of_given"),
    [
        ("trainer", "rl", "supervised"),
        ("trains_by", "ppo", "dpo"),
        ("longest_parts", (100, 50), (50, 51)),
        ("longest_sequence", 150, 101),
        ("sequences_per_step", 24, 8),
        ("epochs", 3, 1),
        ("optimizer_steps_per_step", 6, 1),
        ("needs_old_log_probs", True, False),
        ("needs_ray", True, False),
        ("engine_places", 6, 0),
        ("trained_roles", ("policy", "critic"), ("policy",)),
        ("model_folders", {"model.path": "m", "critic.init_from": "c", "reward_model.path": "r"}, {"model.path": "m"}),
    ],
)
def test_both_answer_each_question(question: str, of_rl: object, of_given: object) -> None:
    assert getattr(parsed(RL), question) == of_rl
    assert getattr(parsed(GIVEN), question) == of_given


def test_what_a_reference_of_its_own_and_a_metric_are_called() -> None:
    assert parsed(GIVEN, "reference.layout={dp: 2}").needs_ray
    assert not parsed(GIVEN, "reference.layout={dp: 2}", "objective.name=sft").needs_ray  # which uses no reference
    assert parsed(RL).metric_prefix("critic") == "critic"
    assert parsed(GIVEN).metric_prefix("policy") == "train"
    assert parsed(RL).sampling is not None
    assert parsed(GIVEN).sampling is None
    assert ("sequences per step", "24 = 6 x 4") in parsed(RL).batch_rows()
    assert ("pairs per step", "8") in parsed(GIVEN).batch_rows()
