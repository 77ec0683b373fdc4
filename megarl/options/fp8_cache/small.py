"""Keys and values in FP8 of engines of a run that is made small, for a rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.options.fp8_cache.section import kv_cache_dtype_of


def shrink(config: Config, tree: dict[str, Any], model: Path, *, vocabulary: int) -> None:
    """Have the small run's engines keep them so, too."""
    tree["rollout"]["kv_cache_dtype"] = kv_cache_dtype_of(config.rollout)
