"""The section `rollout.episode.agent`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Positive, Seconds, Section


class VerifiersConfig(Section):
    """An environment of the `verifiers` package that acts by itself (docs/sandboxes.md)."""

    environment: str = ""
    """Name of the environment, as `verifiers.load_environment` takes it. Empty: none."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    python: str | None = None
    """Python that has `verifiers` 0.1 and the environment. null: the one of megarl."""


class AgentConfig(Section):
    """A program that acts by itself: it asks an endpoint of megarl for turns of the policy, as OpenAI's or Anthropic's
    (docs/agents.md)."""

    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Command line, started for each episode. `{prompt}` and `{row.KEY}` in it stand for fields of the row."""
    function: str | None = None
    """In place of `command`: a function `agent(task)` as `package.module:function` or `path/to/file.py:function`. An `async
    def` serves many episodes at once."""
    verifiers: VerifiersConfig = VerifiersConfig()
    """In place of `command`: an environment of the `verifiers` package, whose rubric gives the reward."""
    processes: Positive | None = None
    """Number of processes that run `function` or `verifiers`. null: half as many as cores."""
    at_once: Positive = 64
    """Maximum number of agents that act at the same time."""
    timeout_s: Seconds = 600.0
    """Time limit in seconds for one episode; what was said until then, and the turn that is being sampled, is kept, as
    truncated."""
    rewards: Literal["episode", "branch"] = "episode"
    """What is rewarded: the whole `episode`, by the branch of its last turn, or each `branch` by itself."""
    history: Literal["tokens", "template"] = "tokens"
    """How later requests show earlier turns: by the `tokens` that were sampled, or as the chat `template` writes them anew."""
    models: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further names by which agents may ask for the policy. It is always called `megarl`."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens on. Other than loopback: whoever reaches it still needs an episode's key."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of `command`."""
    pass_environment: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of environment variables of the run that `command` gets too."""


AGENT = AddedField("EpisodeConfig", "agent", AgentConfig, AgentConfig(), "The program of `kind: agent`.")
FIELDS = (AGENT,)
agent_of = AGENT.of
"""The section `agent` of a section `episode`."""
