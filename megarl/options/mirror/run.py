"""The mirror in a run: checkpoints and records are copied when they are whole, and brought back at a start."""

from __future__ import annotations

from megarl.config import AnyConfig
from megarl.options.mirror.mirroring import Mirroring
from megarl.options.mirror.section import mirror_of
from megarl.runs.run_checkpoint import CheckpointFolder


def observe(config: AnyConfig, checkpoints: CheckpointFolder) -> Mirroring | None:
    """The mirror that `run.mirror` asks for."""
    return Mirroring(config, checkpoints) if mirror_of(config.run) is not None else None
