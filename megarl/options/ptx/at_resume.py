"""Answers of `ptx` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers, like

AT_RESUME = answers(
    ("ptx", APPLIED, "coef samples_per_step turns"),
    ("ptx", like("data.train"), "data"),
)
