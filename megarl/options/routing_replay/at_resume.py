"""Answers of `policy.routing` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("policy.routing", APPLIED, "replay compare_every"),
)
