"""Answers of `data.curriculum` to a change at resume: the place in an epoch has its meaning by the order."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers, refused

ORDERED = refused("the order of an epoch follows from it, and the run is within one")
AT_RESUME = answers(
    ("data.curriculum", ORDERED, "key order ordered_epochs"),
    ("data.curriculum.stages[]", ORDERED, "min max"),
    ("data.curriculum.stages[]", APPLIED, "steps"),
    ("data.curriculum", APPLIED, "min_pass_rate max_pass_rate pass_rate_memory pause_epochs"),
)
