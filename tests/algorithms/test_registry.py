"""Registries: what a name in the config can stand for, and the sentence when it stands for nothing."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from megarl.algorithms import AGGREGATIONS, POLICY_LOSSES, Registry
from megarl.algorithms.preference import PREFERENCE_LOSSES
from megarl.config.presets import AggregationName
from megarl.errors import ConfigError
from megarl.system.user_code import load_user_function


def test_every_aggregation_of_the_config_is_registered() -> None:
    assert set(get_args(AggregationName)) == set(AGGREGATIONS)


def test_an_import_path_resolves_to_the_users_function() -> None:
    assert Registry("loss", lambda name, _: load_user_function(name, ConfigError)).resolve("math:sqrt") is math.sqrt
    with pytest.raises(ConfigError, match="preference loss is 'math:sqrt'; it must be one of"):
        PREFERENCE_LOSSES.resolve("math:sqrt")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cilp", r"policy loss is 'cilp'; it must be one of clip, .* \(did you mean 'clip'\?\)"),
        ("no_such_package:loss", "algorithm.policy_loss: 'no_such_package:loss': no_such_package cannot be imported"),
        (":loss", "names no function"),
        ("math:sqrtt", r"has no function 'sqrtt' \(did you mean 'sqrt'\?\)"),
        ("math:pi", "has no function 'pi'"),
        ("math:sqrt", "must be callable as a policy loss is"),
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
