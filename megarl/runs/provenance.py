"""The origin of a checkpoint: the code and the libraries that wrote it, the config's hash and the weights' version.

It stands in the manifest. What differs when a run is resumed is said, and nothing more: other code may well be why it is.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from megarl.version import __version__

CONFIG = "config.yaml"
_LIBRARIES = ("torch", "megatron-core")


def provenance(config_text: str, step: int, weight_version: int | None) -> dict[str, Any]:
    """The provenance of a checkpoint of `step`, JSON-able. `config_text` is the resolved config as YAML.

    `weight_version` is that of the engines, None where there are none.
    """
    return {
        "step": step,
        "weight_version": weight_version,
        "config_sha256": hashlib.sha256(config_text.encode()).hexdigest(),
        "megarl": __version__,
        "commit": commit(),
        **{name: metadata.version(name) for name in _LIBRARIES},
    }


def code_differences(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence, if a checkpoint was made by other code or libraries than resume it; none if not.

    `made` and `now` are `provenance()`'s answers of the two.
    """
    code = [
        f"{name} {made[name] or 'of unknown origin'}, now {now[name] or 'of unknown origin'}"
        for name in ("megarl", "commit", *_LIBRARIES)
        if name in made and made[name] != now[name]
    ]
    return [f"the checkpoint was written by {'; '.join(code)}"] if code else []


@cache
def commit() -> str | None:
    """The commit of the working tree that this code is in, with `-dirty` if it was changed; None where it is installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
