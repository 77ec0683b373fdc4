"""FieldAnswers of `rollout.max_engines` and `rollout.sites` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("rollout", APPLIED, "max_engines"),
    ("rollout.sites", APPLIED, "host port engines token_file"),
)
