"""What a run leaves that must be the same where the run is: its metrics without times, and its checkpoints' tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load

from megarl.observe import read_metrics

BY_ENGINES = ("rollout/prompt_tokens", "rollout/cached_tokens", "rollout/cache_hit_rate")
"""Metrics of what engines computed, of which a replay knows nothing."""
TIMES = ("time/", "time_fraction/", "speed/", "eval/seconds", "memory/", "policy/tflops_per_gpu", "policy/tower_forward_s",
         "checkpoint/mirror")  # fmt: skip


def curve(folder: Path) -> list[dict[str, float]]:
    """Metrics of every step without what depends on the clock and the machine."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything that a role's checkpoint has, weights and moments, by key."""
    reader = FileSystemReader(folder)
    described = reader.read_metadata().state_dict_metadata
    state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in described.items() if hasattr(v, "chunks")}
    load(state, storage_reader=reader, no_dist=True)
    return state
