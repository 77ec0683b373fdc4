"""What a config of agents contradicts is one sentence."""

from __future__ import annotations

import pytest

from megarl.config import parse_config
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError
from tests.config.smallest import RL

AGENT = ["rollout.episode.kind=agent", "rollout.episode.agent.function=a.py:act"]


def refusal(*changes: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(apply_overrides(RL, list(changes)))
    return str(raised.value)


def test_an_agent_is_one_program_in_an_episode_of_its_kind() -> None:
    config = parse_config(apply_overrides(RL, [*AGENT, "rollout.episode.agent.rewards=branch"]))
    assert config.rewards_by_branch
    assert not parse_config(apply_overrides(RL, AGENT)).rewards_by_branch
    assert "rollout.episode.kind = 'agent' needs one program" in refusal("rollout.episode.kind=agent")
    assert "needs one program" in refusal(*AGENT, "rollout.episode.agent.command=[act]")
    assert "rollout.episode.agent needs an episode in which it acts" in refusal("rollout.episode.agent.function=a.py:act")
    assert "rollout.episode.tools needs an episode of kind" in refusal(*AGENT, "rollout.episode.tools=[b.py:c]")


TOOLS = ["rollout.episode.kind=tools"]
BASH = [*TOOLS, "rollout.episode.tools=['sandbox:bash']"]
SANDBOX = "rollout.episode.sandbox"
MCP = [*TOOLS, "rollout.episode.tools=['mcp:a']"]
OPENENV = ["rollout.episode.kind=environment", "rollout.episode.openenv.url=http://h:1"]


@pytest.mark.parametrize(
    "changes",
    [
        [*BASH, f"{SANDBOX}.kind=seccomp"],
        [*BASH, f"{SANDBOX}.kind=docker", f"{SANDBOX}.image=x"],
        [*AGENT, f"{SANDBOX}.kind=auto"],
        [*MCP, "rollout.episode.mcp.a.command=[server]"],
        [*MCP, "rollout.episode.mcp.a.url=http://h:1/mcp", "rollout.episode.mcp.a.token_env=T"],
        OPENENV,
        ["rollout.episode.kind=agent", "rollout.episode.agent.verifiers.environment=x"],
    ],
)
def test_sandboxes_servers_and_environments_of_others_are_taken(changes: list[str]) -> None:
    parse_config(apply_overrides(RL, changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (BASH, "the tool 'sandbox:bash' needs a sandbox: set rollout.episode.sandbox.kind"),
        ([f"{SANDBOX}.memory_mb=3"], "rollout.episode.sandbox needs a kind"),
        ([f"{SANDBOX}.kind=seccomp"], "rollout.episode.sandbox needs a tool or an agent that works in it"),
        ([*BASH, f"{SANDBOX}.kind=docker"], "rollout.episode.sandbox.kind = 'docker' needs an image"),
        ([*BASH, f"{SANDBOX}.kind=seccomp", f"{SANDBOX}.image=x"], "rollout.episode.sandbox.image is x"),
        (
            ["rollout.episode.kind=environment", "rollout.episode.tools=['sandbox:bash']", f"{SANDBOX}.kind=seccomp"],
            "which only episodes with tools call",
        ),
        (
            ["rollout.episode.kind=agent", "rollout.episode.agent.command=[a]", f"{SANDBOX}.kind=docker", f"{SANDBOX}.image=x"],
            "keeps an agent in a container from its endpoint",
        ),
        (
            ["rollout.episode.kind=agent", "rollout.episode.agent.verifiers.environment=x", f"{SANDBOX}.kind=seccomp"],
            "rollout.episode.sandbox needs an agent that is a command or a function",
        ),
        (MCP, "the tool 'mcp:a' needs a server 'a' in rollout.episode.mcp"),
        ([*MCP, "rollout.episode.mcp.a.tools=[b]"], "rollout.episode.mcp.a needs one way to reach it"),
        (
            [*BASH, f"{SANDBOX}.kind=seccomp", "rollout.episode.mcp.a.command=[b]"],
            "rollout.episode.mcp.a needs a tool that uses it",
        ),
        ([*MCP, "rollout.episode.mcp.a.command=[b]", "rollout.episode.mcp.a.token_env=T"], "mcp.a.token_env needs a url"),
        ([*OPENENV, *TOOLS], "rollout.episode.openenv needs an episode in an environment"),
        ([*OPENENV, "rollout.episode.tools=['a.py:B']"], "rollout.episode.openenv needs an episode without a class of its own"),
        ([*OPENENV, "rollout.episode.openenv.url=h:1"], "rollout.episode.openenv.url is h:1"),
        ([*AGENT, "rollout.episode.agent.verifiers.environment=x"], "rollout.episode.kind = 'agent' needs one program"),
    ],
)
def test_what_they_contradict_is_named(changes: list[str], sentence: str) -> None:
    said = refusal(*changes)
    assert sentence in said.replace("'x'", "x").replace("'h:1'", "h:1"), said


@pytest.mark.parametrize("advantage", ["gae", "turn_rloo"])
def test_estimators_that_follow_one_response_are_refused(advantage: str) -> None:
    changes = ["algorithm.name=ppo"] if advantage == "gae" else [f"algorithm.advantage={advantage}"]
    assert "the episode of an agent may have several branches" in refusal(*AGENT, *changes)


def test_scores_of_steps_are_refused() -> None:
    changes = ["reward_model.path=models/judge", "reward_model.per_step=true"]
    assert "the episode of an agent may have several branches; it must be false" in refusal(*AGENT, *changes)


def test_a_history_is_of_tokens_or_of_the_template() -> None:
    agent = parse_config(apply_overrides(RL, [*AGENT, "rollout.episode.agent.history=template"])).rollout.episode.agent
    assert agent.history == "template"
    assert "rollout.episode.agent.history" in refusal(*AGENT, "rollout.episode.agent.history=text")
