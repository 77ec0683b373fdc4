"""Answers of `teacher` and `algorithm.distillation` to a change at resume: teachers are in no checkpoint."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers, like

AT_RESUME = answers(
    ("algorithm.distillation", APPLIED, "coef reward_coef apply_to gamma divergence beta top_k top_k_of"),
    ("teacher", APPLIED, "path megatron data_key"),
    ("teacher", like("policy.layout"), "layout"),
    ("teacher.named[]", APPLIED, "name path megatron"),
    ("teacher.named[]", like("policy.layout"), "layout"),
)
