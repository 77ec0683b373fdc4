"""Answer of `rollout.host_cache_gb` to a change at resume."""

from __future__ import annotations

from megarl.config.at_resume import APPLIED, answers

AT_RESUME = answers(
    ("rollout", APPLIED, "host_cache_gb"),
)
