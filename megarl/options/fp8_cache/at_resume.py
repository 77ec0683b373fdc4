"""Answer of `rollout.kv_cache_dtype` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("rollout", APPLIED, "kv_cache_dtype"),
)
