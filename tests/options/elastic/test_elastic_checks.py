"""What `resources.spares` and `resources.shrink` do not go with, each in one sentence."""

from __future__ import annotations

import re

import pytest

from megarl.errors import ConfigError
from tests.config.smallest import config, supervised

SHRINK = "resources.shrink needs"
REFUSED = {
    f"{SHRINK} ranks that are replaced: set resources.spares, to 0 or more, or remove it": ["resources.shrink=true"],
    f"{SHRINK} a layout with replicas: set dp of a layout to 2 or more": ["resources.shrink=true", "resources.spares=0"],
    "resources.spares is -1; it must be a whole number of at least 0 or null": ["resources.spares=-1"],
}


@pytest.mark.parametrize(("sentence", "overrides"), REFUSED.items(), ids=range(len(REFUSED)))
def test_contradictions_are_named(sentence: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config(*overrides)


@pytest.mark.parametrize("field", ["resources.spares=1", "resources.shrink=true"])
def test_supervised_runs_do_not_replace_ranks(field: str) -> None:
    with pytest.raises(ConfigError, match="replaces ranks of runs of reinforcement learning alone"):
        supervised(field)


def test_both_go_with_replicas() -> None:
    made = config("resources.spares=2", "resources.shrink=true", "policy.layout.dp=2")
    assert made.resources.model_dump()["spares"] == 2
