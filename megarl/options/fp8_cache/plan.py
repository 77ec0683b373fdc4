"""Bytes of keys and values in FP8, of a planned run."""

from __future__ import annotations

from megarl.config import AnyConfig
from megarl.options.fp8_cache.checks import check_model
from megarl.options.fp8_cache.section import FP8, kv_cache_dtype_of


def cache_itemsize(config: AnyConfig) -> int | None:
    """Bytes of a number in the engines' cache; None: those of the model's dtype.

    Raises:
        ConfigError: the model's keys and values cannot be kept in FP8.
    """
    sampling = config.sampling
    if sampling is None or kv_cache_dtype_of(sampling) != FP8:
        return None
    check_model(config)
    return 1 if sampling.engine == "sglang" else None
