"""Answers of `rollout.episode.openenv` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("rollout.episode.openenv", APPLIED, "url action_key observation_key reset_key at_once token_env"),
)
