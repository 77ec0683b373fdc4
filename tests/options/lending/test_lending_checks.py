"""What lent engines do not go with, each in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import Config, parse_config
from megarl.errors import ConfigError
from megarl.options.lending.checks import with_lent_engines

ASYNC = {"mode": "async"}


def config_of(lent: int = 2, rollout: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A run that may lend the GPUs of its four ranks."""
    task = {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "policy": {"layout": {"tp": 2, "dp": 2}},
        "data": {"train": task},
        "rewards": [{"name": "exact_number"}],
        "resources": {"placement": "separate"},
        "algorithm": {"kl": {"coef": 0.0}},
        "rollout": {"schedule": {"mode": "async", "lent_engines": lent}} | (rollout or {}),
    }
    return parse_config(tree | sections)


@pytest.mark.parametrize(
    ("rollout", "sections", "message"),
    [
        ({}, {"resources": {"placement": "colocated"}}, "set resources.placement to 'separate', or remove rollout"),
        (
            {"schedule": {"mode": "sync", "lent_engines": 1}},
            {},
            "set rollout.schedule.mode to 'async', or remove rollout.schedule.lent_engines",
        ),
        ({"schedule": {"mode": "one_step_off_policy", "lent_engines": 1}}, {}, "set rollout.schedule.mode to 'async'"),
        (
            {"schedule": ASYNC | {"lent_engines": 5}},
            {},
            "is 5, which of rollout.tp = 1 have no room on the trainer's 4 GPUs; it must be at most 4",
        ),
        ({"schedule": ASYNC | {"lent_engines": 3}, "tp": 2}, {}, "it must be at most 2"),
        ({"weight_transport": "process_group"}, {}, "rollout.weight_transport is 'process_group'; it must be 0"),
        (
            {"weight_transport": "folder", "servers": {"urls": ["http://a"]}},
            {},
            "which rollout.engine = 'sglang' cannot do on servers that run already",
        ),
        ({"engine_args": {"enable_memory_saver": False}}, {}, "enable_memory_saver = false forbids; it must be 0"),
        ({"speculative": {"algorithm": "ngram"}}, {}, "cannot tell which tokens of a draft"),
        ({"episode": {"kind": "agent", "agent": {"command": ["a"]}}}, {}, "have an agent's episode begin anew"),
        ({}, {"policy": {"lora": {"rank": 4, "sync": "adapters"}}}, "wake up without the weights that adapters are added to"),
    ],
)
def test_what_lent_engines_do_not_go_with_is_refused(rollout: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")) as caught:
        config_of(rollout={"schedule": ASYNC | {"lent_engines": 1}, **rollout}, **sections)
    assert "\n" not in str(caught.value)


def test_as_many_as_have_room_are_allowed_whatever_the_engine_that_can_sleep() -> None:
    assert config_of(4).rollout.lent_engines == 4
    assert config_of(rollout={"engine": "embedded", "schedule": ASYNC | {"lent_engines": 1}}).rollout.lent_engines == 1
    assert config_of(rollout={"engine": "own.py:Engine", "schedule": ASYNC | {"lent_engines": 1}})
    drafts = {"engine": "embedded", "speculative": {"algorithm": "ngram"}, "schedule": ASYNC | {"lent_engines": 1}}
    assert config_of(rollout=drafts).rollout.speculative.algorithm == "ngram"


def test_whether_a_run_could_lend_is_told_without_changing_it() -> None:
    config = config_of(0)
    lending = with_lent_engines(config, 4)
    assert lending is not None
    assert (config.rollout.lent_engines, lending.rollout.lent_engines) == (0, 4)
    assert with_lent_engines(config, 0) is None
    assert with_lent_engines(config, 5) is None
    assert with_lent_engines(config_of(0, {"schedule": {"mode": "sync"}}), 4) is None
