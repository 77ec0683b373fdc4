"""Answers of `reward_model` to a change at resume: it is in no checkpoint."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers, like

AT_RESUME = answers(
    ("reward_model", APPLIED, "path freeze megatron weight per_step step_aggregation"),
    ("reward_model", like("policy.layout"), "layout"),
)
