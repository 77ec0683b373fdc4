"""Registries: what a name in the config can stand for, and the sentence when it stands for nothing."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from megarl.algorithms import ADVANTAGES, AGGREGATIONS, POLICY_LOSSES, Registry
from megarl.config.presets import AdvantageName, AggregationName, PolicyLossName
from megarl.errors import ConfigError


def test_every_name_of_the_config_is_registered() -> None:
    assert set(get_args(AdvantageName)) <= set(ADVANTAGES)
    assert set(get_args(PolicyLossName)) == set(POLICY_LOSSES)
    assert set(get_args(AggregationName)) == set(AGGREGATIONS)


def test_an_import_path_resolves_to_the_users_function() -> None:
    assert Registry("loss").resolve("math:sqrt") is math.sqrt


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cilp", r"policy loss is 'cilp', but it may be one of clip, .* \(did you mean 'clip'\?\)"),
        ("no_such_package:loss", "module 'no_such_package' cannot be imported"),
        (":loss", "cannot be imported"),
        ("math:sqrtt", r"has no function 'sqrtt' \(did you mean 'sqrt'\?\)"),
        ("math:pi", "has no function 'pi'"),
    ],
)
def test_an_unknown_name_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        POLICY_LOSSES.resolve(name)
    assert "\n" not in str(error.value)


def test_a_name_is_given_once() -> None:
    registry: Registry = Registry("loss")
    registry.register("sqrt")(math.sqrt)
    with pytest.raises(ValueError, match="registered already"):
        registry.register("sqrt")(math.exp)
