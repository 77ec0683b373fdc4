"""Answers about keys and values in FP8 to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.options.fp8_cache.section import FP8, kv_cache_dtype_of


def engines_round(config: Config) -> bool:
    """Return whether engines compute with fewer bits than the trainer, so that how far they are apart depends on the model."""
    return kv_cache_dtype_of(config.rollout) == FP8
