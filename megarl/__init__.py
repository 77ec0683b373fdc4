"""megarl: reinforcement learning of large language models on megatron-core, SGLang and Ray.

The names below are what programs use (docs/python.md). Each is imported when it is first asked for: importing the package
imports neither torch nor any of the three.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megarl.version import __version__

if TYPE_CHECKING:
    from megarl.api import open, train
    from megarl.config import Config, load_config
    from megarl.core.session import Session
    from megarl.data.batch import Batch
    from megarl.data.sample import Prompt, Sample
    from megarl.errors import MegarlError

__all__ = ["Batch", "Config", "MegarlError", "Prompt", "Sample", "Session", "__version__", "load_config", "open", "train"]
_HOMES = {
    "Batch": "megarl.data.batch",
    "Config": "megarl.config",
    "MegarlError": "megarl.errors",
    "Prompt": "megarl.data.sample",
    "Sample": "megarl.data.sample",
    "Session": "megarl.core.session",
    "load_config": "megarl.config",
    "open": "megarl.api",
    "train": "megarl.api",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megarl' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
