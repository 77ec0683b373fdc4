"""What a config of agents contradicts is one sentence."""

from __future__ import annotations

import pytest

from megarl.config import parse_config
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError
from tests.config.test_schema import BASE

AGENT = ["rollout.episode.kind=agent", "rollout.episode.agent.function=a.py:act"]


def refusal(*changes: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(apply_overrides(BASE, list(changes)))
    return str(raised.value)


def test_an_agent_is_one_program_in_an_episode_of_its_kind() -> None:
    config = parse_config(apply_overrides(BASE, [*AGENT, "rollout.episode.agent.rewards=branch"]))
    assert config.rewards_by_branch
    assert not parse_config(apply_overrides(BASE, AGENT)).rewards_by_branch
    assert "rollout.episode.kind = 'agent' needs one program" in refusal("rollout.episode.kind=agent")
    assert "needs one program" in refusal(*AGENT, "rollout.episode.agent.command=[act]")
    assert "rollout.episode.agent needs an episode in which it acts" in refusal("rollout.episode.agent.function=a.py:act")
    assert "rollout.episode.tools needs an episode of kind" in refusal(*AGENT, "rollout.episode.tools=[b.py:c]")


@pytest.mark.parametrize("advantage", ["gae", "turn_rloo"])
def test_estimators_that_follow_one_response_are_refused(advantage: str) -> None:
    changes = ["algorithm.name=ppo"] if advantage == "gae" else [f"algorithm.advantage={advantage}"]
    assert "the episode of an agent may have several branches" in refusal(*AGENT, *changes)


def test_scores_of_steps_are_refused() -> None:
    changes = ["reward_model.path=models/judge", "reward_model.per_step=true"]
    assert "the episode of an agent may have several branches; it must be false" in refusal(*AGENT, *changes)


def test_a_history_is_of_tokens_or_of_the_template() -> None:
    agent = parse_config(apply_overrides(BASE, [*AGENT, "rollout.episode.agent.history=template"])).rollout.episode.agent
    assert agent.history == "template"
    assert "rollout.episode.agent.history" in refusal(*AGENT, "rollout.episode.agent.history=text")
