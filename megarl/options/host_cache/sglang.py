"""The arguments of SGLang's servers that keep keys and values in main memory, too (0.5.23)."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.options.host_cache.checks import FIELD
from megarl.options.host_cache.section import host_cache_gb_of


def check_servers(config: Config, platform: str) -> None:
    """Refuse a cache in main memory where the first cache is there already.

    Raises:
        ConfigError: the run is on a CPU.
    """
    size = host_cache_gb_of(config.rollout)
    if size and platform == "cpu":
        reason = "is for servers on GPUs: on a CPU the cache is in main memory already (rollout.engine_args.max_total_tokens)"
        raise ConfigError.of(FIELD, size, reason, allowed="0", rule=reason)


def server_arguments(config: Config, folder: str) -> dict[str, Any]:
    """Arguments for the model in `folder`; none without a cache in main memory."""
    size = host_cache_gb_of(config.rollout)
    return {"enable_hierarchical_cache": True, "hicache_size": size} if size else {}
