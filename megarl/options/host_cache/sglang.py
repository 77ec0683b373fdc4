"""The arguments of SGLang's servers that keep keys and values in main memory, too (0.5.23)."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.options.host_cache.section import host_cache_gb_of


def server_arguments(config: Config, folder: str) -> dict[str, Any]:
    """Arguments for the model in `folder`; none without a cache in main memory."""
    size = host_cache_gb_of(config.rollout)
    return {"enable_hierarchical_cache": True, "hicache_size": size} if size else {}
