"""Answers of the option's fields to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("resources", APPLIED, "spares shrink compare_replicas slow_ranks"),
)
