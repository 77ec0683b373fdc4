"""Answers of `rollout.episode.agent` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("rollout.episode.agent", APPLIED, "command function processes at_once timeout_s rewards history models host environment"),
    ("rollout.episode.agent", APPLIED, "pass_environment"),
    ("rollout.episode.agent.verifiers", APPLIED, "environment arguments python"),
)
