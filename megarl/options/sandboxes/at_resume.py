"""Answers of `rollout.episode.sandbox` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("rollout.episode.sandbox", APPLIED, "kind image memory_mb processes disk_mb output_kb timeout_s network files files_key"),
    ("rollout.episode.sandbox", APPLIED, "readable environment at_once"),
)
