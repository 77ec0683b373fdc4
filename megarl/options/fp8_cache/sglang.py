"""Keys and values in FP8 in SGLang's servers (0.5.23)."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.options.fp8_cache.checks import check_model
from megarl.options.fp8_cache.section import FP8, MARK, kv_cache_dtype_of


def check_servers(config: Config, platform: str) -> None:
    """Refuse models that it is not for."""
    check_model(config)


def server_arguments(config: Config, folder: str) -> dict[str, Any]:
    """Arguments for the model in `folder`; none with keys and values in the model's dtype."""
    return {"kv_cache_dtype": FP8, MARK: True} if kv_cache_dtype_of(config.rollout) == FP8 else {}
