"""`policy.routing`: what it needs is said in one sentence each."""

from __future__ import annotations

import pytest

from megarl.config import parse_supervised_config
from megarl.errors import ConfigError
from tests.config.smallest import config

ENGINE = "policy.routing.replay=engine"


def test_who_replays_what() -> None:
    assert config().routing_replay == "none"
    assert config(ENGINE, "policy.routing.compare_every=5").routing_replay == "engine"
    assert config("policy.routing.replay=old_policy", "algorithm.mini_batches=2").routing_replay == "old_policy"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("policy.routing.replay=old_policy",),
            r"policy\.routing\.replay is 'old_policy', which replays the pass that computes old log-probs, and.*"
            "it must be 'none' or 'engine'",
        ),
        (
            ("policy.routing.replay=old_policy", "algorithm.mini_batches=2", "algorithm.rollout_correction={mode: bypass}"),
            r"policy\.routing\.replay is 'old_policy'.*this run has none",
        ),
        (
            (ENGINE, "rollout.engine=replay", "rollout.replay_from=samples.jsonl"),
            r"policy\.routing\.replay is 'engine'.*which rollout\.engine = 'replay' cannot say",
        ),
        (
            (ENGINE, "rollout.weight_transport=folder", "rollout.servers.urls=['http://a']"),
            r"policy\.routing\.replay is 'engine'.*cannot say",
        ),
        (("policy.routing.compare_every=2",), r"policy\.routing\.compare_every needs policy\.routing\.replay = 'engine'"),
        (
            ("rollout.engine_args={enable_return_routed_experts: true}",),
            r"enable_return_routed_experts is set by policy\.routing\.replay",
        ),
        (("policy.megatron={moe_enable_routing_replay: true}",), r"moe_enable_routing_replay is true, which megarl sets"),
        (
            (ENGINE, "policy.megatron={moe_expert_capacity_factor: 1.5}"),
            r"policy\.megatron\.moe_expert_capacity_factor is 1\.5, which drops choices of experts, and "
            r"policy\.routing\.replay = 'engine' needs all of them; it must be left out",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_training_on_given_responses_has_nothing_to_replay() -> None:
    tree = {"model": {"path": "nowhere"}, "data": {"train": {"source": "jsonl", "path": "rows"}}, "objective": {"name": "sft"}}
    with pytest.raises(ConfigError, match=r"policy\.routing\.replay is 'engine', which only reinforcement learning"):
        parse_supervised_config(tree | {"policy": {"routing": {"replay": "engine"}}})
