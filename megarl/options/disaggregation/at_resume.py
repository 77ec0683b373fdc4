"""Answers of `rollout.disaggregation` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("rollout.disaggregation", APPLIED, "prefill decode transport"),
)
