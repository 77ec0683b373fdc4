"""Answers of `rollout.episode.mcp` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("rollout.episode", APPLIED, "mcp"),
    ("rollout.episode.mcp.NAME", APPLIED, "command url tools per_episode environment pass_environment token_env"),
)
