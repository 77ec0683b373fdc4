"""Answers of `policy.lora` and `critic.lora` to a change at resume: the checkpoint has the adapters, and nothing else."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers, refused

SHAPE = refused("the checkpoint has the other adapters")
AT_RESUME = answers(
    ("policy.lora", SHAPE, "rank targets exclude"),
    ("policy.lora", refused("the reference is the policy as it began"), "adapter"),
    ("policy.lora", APPLIED, "alpha rslora sync"),
    ("critic.lora", SHAPE, "rank targets exclude"),
    ("critic.lora", refused("the weights are the checkpoint's"), "adapter"),
    ("critic.lora", APPLIED, "alpha rslora"),
)
