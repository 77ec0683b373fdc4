"""Answers of `trackers` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("trackers", APPLIED, "backends args project entity group tags notes opentelemetry"),
    ("trackers.prometheus", APPLIED, "port host token_file"),
)
