"""Checks of the section `rollout.episode.agent`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.option_list import functions
from megarl.options.agents.section import agent_of


def check(config: Config) -> None:
    """Refuse an agent that is no program, or whose episodes an estimator cannot use; and a sandbox that it cannot work in."""
    episode, agent = config.rollout.episode, agent_of(config.rollout.episode)
    if episode.kind != "agent":
        if agent != type(agent)():
            remedy = "set rollout.episode.kind to 'agent', or remove rollout.episode.agent"
            raise ConfigError.needs("rollout.episode.agent", "an episode in which it acts", remedy)
        return
    if [bool(agent.command), agent.function is not None, bool(agent.verifiers.environment)].count(True) != 1:
        remedy = "set one of command, function and verifiers.environment in rollout.episode.agent"
        raise ConfigError.needs("rollout.episode.kind = 'agent'", "one program", remedy)
    if episode.tools:
        remedy = "remove rollout.episode.tools: an agent brings its own"
        raise ConfigError.needs("rollout.episode.tools", "an episode of kind 'tools' or 'environment'", remedy)
    if any(gives(config) for gives in functions("questions", "gives_step_rewards")):
        why = "scores the steps of one response, and the episode of an agent may have several branches"
        raise ConfigError.of("reward_model.per_step", "true", why, allowed="false")
    needed = config.algorithm.estimator_needs
    for name, is_needed in (
        ("values", config.uses_critic),
        ("turn_rewards", needed.turn_rewards),
        ("pairs", config.algorithm.loss_needs.pairs),
    ):
        if is_needed:
            why = f"needs {name.replace('_', ' ')} along one response, and the episode of an agent may have several branches"
            allowed = "an estimator of whole responses, such as grpo, rloo or reinforce_plus_plus"
            raise ConfigError.of("algorithm.advantage", config.algorithm.advantage, why, allowed=allowed)
    sandbox = getattr(episode, "sandbox", None)  # another option's
    if sandbox is None or sandbox.kind == "none":
        return
    if agent.verifiers.environment:
        remedy = "remove rollout.episode.sandbox: what the environment runs, it runs by itself"
        raise ConfigError.needs("rollout.episode.sandbox", "an agent that is a command or a function", remedy)
    if agent.command and sandbox.kind in ("docker", "apptainer", "auto") and sandbox.image and not sandbox.network:
        why = "keeps an agent in a container from its endpoint"
        raise ConfigError.of("rollout.episode.sandbox.network", False, why, allowed="true, or set kind to 'seccomp'")
