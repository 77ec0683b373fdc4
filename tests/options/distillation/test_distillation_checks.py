"""`algorithm.distillation` and `teacher`: contradictions and what nothing reads are one sentence each."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import Config, parse_config
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError
from megarl.options.distillation.questions import further_roles

BASE: dict[str, Any] = {"model": {"path": "nowhere"}, "data": {"train": {"name": "basic_arithmetic"}}}
REWARDED = BASE | {"rewards": [{"name": "reasoning_gym"}]}
ALONE = ("algorithm.name=opd", "teacher.path=wise")
MIXED = ("algorithm.name=grpo", "algorithm.distillation.coef=0.5", "teacher.path=wise")
NAMED = "teacher.named=[{name: math, path: a}, {name: code, path: b, layout: {tp: 2}}]"


def config(*overrides: str, base: dict[str, Any] = REWARDED) -> Config:
    return parse_config(apply_overrides(base, overrides))


def test_the_teacher_alone_needs_no_reward_and_mixed_with_one_it_does() -> None:
    alone = config(*ALONE, base=BASE)
    assert alone.algorithm.distillation.in_advantage
    assert (alone.algorithm.distillation.coef, alone.algorithm.distillation.reward_coef) == (1.0, 0.0)
    assert alone.needs_old_log_probs
    assert not alone.uses_reference
    with pytest.raises(ConfigError, match="a run needs a source of reward"):
        config(*MIXED, base=BASE)
    with pytest.raises(
        ConfigError, match=r"data\.eval needs a source of reward to measure by: set rewards, or remove data\.eval"
    ):
        config(*ALONE, "data.eval={name: basic_arithmetic}", base=BASE)
    mixed = config(*MIXED).algorithm
    assert (mixed.advantage, mixed.distillation.coef, mixed.distillation.reward_coef) == ("grpo", 0.5, 1.0)


def test_what_the_divergence_of_a_vocabulary_needs() -> None:
    in_loss = (*ALONE, "algorithm.distillation.apply_to=loss")
    assert not config(*in_loss).needs_old_log_probs
    assert config(*in_loss, "algorithm.distillation.top_k_of=policy").needs_old_log_probs


def test_every_teacher_is_a_role_with_a_section_of_its_own() -> None:
    found = config(*ALONE, NAMED)
    assert [role.name for role in found.roles] == ["policy", "teacher", "teacher_math", "teacher_code"]
    assert found.model_folders == {
        "model.path": "nowhere", "teacher.path": "wise", "teacher.named[0].path": "a", "teacher.named[1].path": "b"
    }  # fmt: skip
    assert [*found.layouts] == ["policy", "teacher_code"]
    with pytest.raises(ConfigError, match=r"teacher\.named\[1\]\.layout\.dp is 3, which does not divide the \d+ sequences"):
        config(*ALONE, "teacher.named=[{name: a, path: a}, {name: b, path: b, layout: {dp: 3}}]")
    with pytest.raises(ConfigError, match=r"teacher\.named\[0\]\.megatron\.no_such is not a field"):
        config(*ALONE, "teacher.named=[{name: a, path: a, megatron: {no_such: 1}}]")


REFUSED = [
    (["algorithm.name=opd"], r"algorithm\.distillation\.coef needs a teacher: set teacher\.path or teacher\.named"),
    (["teacher.path=wise"], r"teacher\.path needs an estimator or a loss that reads the teacher's log-probs, or distillation"),
    ([NAMED], r"teacher\.named\[0\]\.path needs an estimator"),
    ([*ALONE, "teacher.named=[{name: a, path: a}, {name: a, path: b}]"], r"teacher\.named is 'a', which 2 teachers are called"),
    ([*ALONE, "teacher.data_key=expert"], r"teacher\.data_key needs teachers that rows name"),
    ([*ALONE, "teacher.named=[{name: a b, path: a}]"], r"teacher\.named\[0\]\.name"),
    (["algorithm.distillation.gamma=1"], r"distillation\.gamma is 1\.0, which algorithm\.distillation\.coef = 0 does not read"),
    (["algorithm.distillation.reward_coef=0"], r"reward_coef is 0\.0, which algorithm\.distillation\.coef = 0 does not read"),
    (["algorithm.distillation.top_k=8"], r"top_k is 8, which algorithm\.distillation\.coef = 0 does not read"),
    ([*ALONE, "algorithm.distillation.top_k=8"], r"top_k is 8, which .*apply_to = 'advantage' does not read; it must be 64"),
    (
        [*ALONE, "algorithm.distillation={apply_to: loss, gamma: 0.5}"],
        r"gamma is 0\.5, which algorithm\.distillation\.apply_to = 'loss' does not read",
    ),
    (
        [*ALONE, "algorithm.distillation={apply_to: loss, beta: 0.2}"],
        r"beta is 0\.2, which algorithm\.distillation\.divergence = 'reverse_kl' does not read",
    ),
    ([*ALONE, "algorithm.distillation={apply_to: loss, divergence: jsd, beta: 1}"], r"distillation\.beta is 1"),
    (
        [*ALONE, "algorithm.advantage=grpo"],
        r"advantage is 'grpo', which .*reward_coef = 0 does not read; it must be 'reinforce'",
    ),
    ([*ALONE, "algorithm.advantage_normalisation=batch"], r"advantage_normalisation is 'batch', which .*reward_coef = 0"),
    ([*ALONE, "algorithm.gamma=0.9"], r"algorithm\.gamma is 0\.9, which algorithm\.distillation\.reward_coef = 0"),
    ([*ALONE, "algorithm.kl={coef: 0.1, apply_to: reward}"], r"kl\.apply_to is 'reward', which .*reward_coef = 0"),
    ([*ALONE, "rollout.dynamic_sampling_rounds=2"], r"dynamic_sampling_rounds is 2, which .*reward_coef = 0"),
    (
        [*ALONE, "algorithm.distillation={apply_to: loss, top_k_of: policy}", "algorithm.rollout_correction.mode=bypass"],
        r"top_k_of is 'policy', which needs the policy's pass at the start of the step",
    ),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED)
def test_a_contradiction_is_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(*overrides)


def test_what_mends_a_contradiction_is_taken() -> None:
    more = "algorithm.distillation.reward_coef=0.5"
    assert config(*ALONE, "algorithm.advantage=grpo", more).algorithm.advantage == "grpo"
    assert config(*ALONE, NAMED, "teacher.data_key=expert").teacher.data_key == "expert"
    own = config("algorithm.name=opd", NAMED, base=BASE)
    assert [role.name for role in further_roles(own)] == ["teacher_math", "teacher_code"]
    bypass = config(*ALONE, "algorithm.policy_loss=reinforce", "algorithm.rollout_correction.mode=bypass")
    assert not bypass.needs_old_log_probs
