"""Answers of `policy.indexer` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers, refused

AT_RESUME = answers(
    ("policy.indexer", refused("the optimizer has moments of indexers only where they are trained"), "train"),
    ("policy.indexer", APPLIED, "loss_coeff replay"),
)
