"""Checks of `rollout.host_cache_gb`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.engine_kinds import SGLANG, EngineCapabilities
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.host_cache.section import host_cache_gb_of

FIELD = "rollout.host_cache_gb"
SET_BY_IT = ("enable_hierarchical_cache", "hicache_size", "hicache_ratio")
"""SGLang's arguments that say how large the cache is."""


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Raise ConfigError for what a cache in main memory does not go with."""
    rollout, size = config.rollout, host_cache_gb_of(config.rollout)
    if not size:
        return
    for name in SET_BY_IT:
        if name in rollout.engine_args:
            raise ConfigError(f"rollout.engine_args.{name} is set by {FIELD}; remove one of the two")
    why = ""
    if engine is not SGLANG:
        why = "asks for SGLang's servers that megarl starts, and rollout.engine = "
        why += f"'{rollout.engine}' has none" if rollout.engine != "sglang" else "'sglang' here asks some that run already"
    elif rollout.engine_args.get("disable_radix_cache"):
        why = "keeps prompts, which rollout.engine_args.disable_radix_cache forbids"
    elif config.resources.placement == "colocated" and rollout.schedule.mode == "sync":
        why = "keeps nothing where engines sleep while the trainer works (resources.placement = 'colocated')"
    if why:
        raise ConfigError.of(FIELD, size, why, allowed="0", rule=why)
