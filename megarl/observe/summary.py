"""`summary.json`: what a finished run amounts to, with the versions and the machine it was measured on.

Written whole or not at all.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from megarl.config import AnyConfig
from megarl.observe.phases import Phases
from megarl.system.atomic_files import write_text_atomically
from megarl.version import __version__

PACKAGES = (
    "torch", "megatron-core", "transformer-engine", "apex", "ray", "sglang", "transformers", "tokenizers", "safetensors",
    "numpy", "pydantic", "reasoning-gym", "math-verify", "tensorboard", "wandb", "nixl",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Version of megarl, Python and every package that can change a result; None for one that is not installed."""
    by_package: dict[str, str | None] = {"megarl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            by_package[package] = None
    return by_package


def machine() -> dict[str, Any]:
    """The machine: system, processor, usable cores and memory in bytes."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def build_summary(
    config: AnyConfig,
    phases: Phases,
    *,
    eval_before: Mapping[str, Any] | None,
    eval_after: Mapping[str, Any] | None,
    gates: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary as a JSON-serialisable dictionary.

    `eval_before` and `eval_after` are the metrics of the two evaluations (None: not evaluated), `gates` the parity
    figures. `extra` is added at the top level.
    """
    wall_s = sum(phase["seconds"] for phase in phases.totals().values())
    return {
        "run": config.run.name,
        "steps": phases.steps,
        "eval": {"before": eval_before, "after": eval_after},
        "phases": phases.totals(),
        "outside_steps": phases.outside(),
        "seconds_per_step": wall_s / phases.steps if phases.steps else None,
        "gates": dict(gates),
        "batch": dict(config.batch_rows()),
        "machine": machine(),
        "versions": versions(),
        **(extra or {}),
    }


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` to `path` as indented JSON, atomically."""
    write_text_atomically(path, json.dumps(summary, indent=2, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
