"""Answers of `resources.spares` and `resources.shrink` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("resources", APPLIED, "spares shrink"),
)
