"""The catalogue names what is registered, and what it says of each estimator and loss is so."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    CHOICES,
    POLICY_LOSSES,
    AdvantageInputs,
    AdvantageOutputs,
    LossSettings,
    RunningMean,
    catalogue,
)
from megarl.algorithms.catalogue import ESTIMATOR_SETTINGS, ESTIMATORS, NORMALISATIONS, SETTINGS, Argument
from megarl.algorithms.preference import PREFERENCE_LOSSES
from megarl.config.presets import AdvantageName, PolicyLossName
from tests.algorithms.batches import ARGUMENTS, B, batch, given_to, resolved

GIVEN_FOR: dict[str, dict[str, Any]] = {
    "values": {"values": None},
    "greedy": {"greedy_scores": None},
    "step_rewards": {"step_rewards": None, "step_ends": None},
    "old_log_probs": {"old_log_probs": None},
    "collision": {"collision": None},
    "sources": {"rewards_by_source": {}, "reward_weights": {}},
    "turn_rewards": {"turn_rewards": None},
    "turn_states": {"states": None},
}
"""What an estimator is not given if it does not have the need."""


def everything(name: str, **changes: Any) -> AdvantageInputs:
    """A batch in which nothing is missing, with rewards that the estimator takes."""
    inputs = batch(baseline=RunningMean(3, 0.25), greedy_scores=torch.linspace(-1, 1, B, dtype=torch.float64))
    return dataclasses.replace(inputs, **changes)


def differs(name: str, **changes: Any) -> bool:
    """Whether the estimator answers something else, or cannot answer, with these inputs changed."""

    def answer(inputs: AdvantageInputs) -> AdvantageOutputs:
        outputs: AdvantageOutputs = resolved(name)(inputs)
        return outputs

    before = answer(everything(name))
    try:
        after = answer(everything(name, **changes))
    except ValueError:
        return True
    same_returns = (before.returns is None) == (after.returns is None)
    return not (same_returns and torch.equal(before.advantages, after.advantages))


def test_the_catalogue_and_the_config_have_the_names_that_are_registered() -> None:
    assert set(ESTIMATORS) == set(ADVANTAGES)
    assert set(catalogue.POLICY_LOSSES) == set(POLICY_LOSSES)
    assert set(get_args(AdvantageName)) == set(ADVANTAGES)
    assert set(get_args(PolicyLossName)) == {*POLICY_LOSSES, *catalogue.PAIR_POLICY_LOSSES}
    assert set(catalogue.PAIR_POLICY_LOSSES) < set(PREFERENCE_LOSSES)
    assert not set(catalogue.PAIR_POLICY_LOSSES) & set(POLICY_LOSSES)


@pytest.mark.parametrize("need", sorted(GIVEN_FOR))
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_reads_what_it_says_it_needs_and_nothing_else(name: str, need: str) -> None:
    assert differs(name, **GIVEN_FOR[need]) is getattr(ESTIMATORS[name], need)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_with_a_critic_answers_what_the_critic_is_trained_on(name: str) -> None:
    outputs: AdvantageOutputs = resolved(name)(everything(name))
    assert (outputs.returns is not None) is ESTIMATORS[name].values


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_compares_groups_if_it_says_so(name: str) -> None:
    alone = everything(name).groups.clone()
    alone[:] = torch.arange(B)
    outputs: AdvantageOutputs = resolved(name)(everything(name, groups=alone))
    assert (outputs.dropped is not None and bool(outputs.dropped.all())) is ESTIMATORS[name].group
    assert differs(name, groups=alone) is ESTIMATORS[name].group


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_has_a_place_for_a_token_penalty(name: str) -> None:
    penalty = torch.linspace(-1, 0, 72, dtype=torch.float64).reshape(9, 8)
    assert differs(name, token_penalty=penalty) is ESTIMATORS[name].token_penalty


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_says_whether_it_gives_one_number_to_a_response(name: str) -> None:
    inputs = everything(name, token_penalty=torch.linspace(-1, 0, 72, dtype=torch.float64).reshape(9, 8))
    advantages = resolved(name)(inputs).advantages
    spread = [row[mask].max() - row[mask].min() for row, mask in zip(advantages, inputs.mask, strict=True)]
    assert bool(max(spread) == 0) is ESTIMATORS[name].per_response


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_normalises_by_itself_as_it_says(name: str) -> None:
    assert not differs(name, normalisation=ESTIMATORS[name].normalisation)
    for other in {*NORMALISATIONS} - {ESTIMATORS[name].normalisation}:
        assert differs(name, normalisation=other)


@pytest.mark.parametrize("setting", ESTIMATOR_SETTINGS)
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_reads_the_constants_that_it_says_it_reads(name: str, setting: str) -> None:
    changed = {"unbiased": False}.get(setting, 0.5)
    raw = functools.partial(everything, name, normalisation="none")
    before, after = (resolved(name)(raw(**change)).advantages for change in ({}, {setting: changed}))
    assert (not torch.equal(before, after)) is (setting in ESTIMATORS[name].settings)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_reads_the_constants_that_it_says_it_reads(name: str, setting: str) -> None:
    new = torch.tensor([-0.1, -3.0, -0.2, -3.5], dtype=torch.float64)
    old = torch.tensor([-3.0, -0.1, -3.5, -0.2], dtype=torch.float64)  # ratios far above and far below 1
    advantages = torch.tensor([1.0, -1.0, -2.0, 2.0], dtype=torch.float64)

    def loss(settings: LossSettings) -> Tensor:
        more = {key: torch.zeros(4) for key in given_to(name, 4)}
        return POLICY_LOSSES.resolve(name)(new, old, advantages, response=torch.arange(4), settings=settings, **more)[0]

    changed = dataclasses.replace(LossSettings(), **{setting: 0.5 if setting != "dual_clip" else 5.0})
    assert (not torch.equal(loss(LossSettings()), loss(changed))) is (setting in catalogue.POLICY_LOSSES[name].settings)


def test_the_constants_are_those_of_the_settings() -> None:
    assert tuple(field.name for field in dataclasses.fields(LossSettings)) == SETTINGS


def optional_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of `function` that have a default, and the default; without `shard`, which no config gives."""
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.default is not one.empty and one.name != "shard"}


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_and_its_choice_take_the_arguments_that_the_config_may_give_them(name: str) -> None:
    needed = catalogue.POLICY_LOSSES[name]
    assert list(optional_arguments(POLICY_LOSSES.resolve(name))) == [one.name for one in needed.arguments]
    assert ("chosen" in inspect.signature(POLICY_LOSSES.resolve(name)).parameters) is bool(needed.choice) is (name in CHOICES)
    if needed.choice:
        assert list(optional_arguments(CHOICES[name])) == [one.name for one in needed.choice]
    defaults = optional_arguments(POLICY_LOSSES.resolve(name)) | optional_arguments(CHOICES.get(name, lambda: None))
    assert all(one.allows(defaults[one.name]) for one in needed.arguments + needed.choice)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_takes_the_arguments_that_the_config_may_give_it(name: str) -> None:
    """Those that it must be given have no default there, and each changes what it answers."""
    parameters = list(inspect.signature(inspect.unwrap(ADVANTAGES.resolve(name))).parameters.values())[1:]
    assert [(one.name, one.default is one.empty) for one in parameters] == [
        (one.name, one.required) for one in ESTIMATORS[name].arguments
    ]
    for one in ESTIMATORS[name].arguments:
        assert not one.required or one.allows(ARGUMENTS[name][one.name])
        other = ARGUMENTS.get(name, {}) | {one.name: {"number": 0.25, "whole": 1, "switch": False}[one.kind]}
        before, after = resolved(name)(everything(name)), ADVANTAGES.resolve(name)(everything(name), **other)
        same_returns = before.returns is None or torch.equal(before.returns, after.returns)
        assert not (torch.equal(before.advantages, after.advantages) and same_returns)


@pytest.mark.parametrize(
    ("argument", "allowed", "values"),
    [
        (Argument("x"), "a number above 0", {1: True, 0: False, -1: False, math.inf: False, math.nan: False}),
        (Argument("x", most=1), "a number above 0 and at most 1", {1.0: True, 0.5: True, 0.0: False, 1.01: False}),
        (Argument("x", most=1, least_allowed=True), "a number of at least 0 and at most 1", {0: True, 1.0: True, -0.1: False}),
        (Argument("x", 1, least_allowed=True, kind="whole"), "a whole number of at least 1", {1: True, 0: False, 1.5: False}),
        (Argument("x", kind="switch"), "true or false", {True: True, False: True, 2: False, 0.5: False}),
    ],
)
def test_an_argument_allows_what_its_sentence_says(argument: Argument, allowed: str, values: dict[Any, bool]) -> None:
    assert argument.allowed == allowed
    assert not any(argument.allows(value) for value in ("1", None, *([] if argument.kind == "switch" else [True])))
    assert {value: argument.allows(value) for value in values} == values
