"""Answers of `policy.mtp` and `rollout.speculative` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers, refused

AT_RESUME = answers(
    ("policy.mtp", refused("the layer is in the checkpoint only where it is trained"), "train"),
    ("policy.mtp", APPLIED, "targets loss_weight"),
    ("rollout.speculative", APPLIED, "algorithm num_steps topk num_draft_tokens draft_model"),
)
