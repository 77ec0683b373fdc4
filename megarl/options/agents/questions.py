"""Answers of agents to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.rollout import EpisodeConfig
from megarl.options.agents.section import agent_of


def rewards_by_branch(episode: EpisodeConfig) -> bool:
    """Return whether each branch of an agent's episode has a reward of its own."""
    return episode.kind == "agent" and agent_of(episode).rewards == "branch"
