"""Teachers of a run that is made small, for a rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.layout_section import LayoutConfig
from megarl.config.schema import Config
from megarl.models.shrunk import shrunk_layout
from megarl.options.distillation.questions import needs_teacher
from megarl.options.distillation.section import distillation_of, teacher_of


def shrink(config: Config, tree: dict[str, Any], model: Path, *, vocabulary: int) -> None:
    """Give the small run's `tree` teachers in the folder `model`, with layouts as small, and no more tokens than there are."""
    if not needs_teacher(config):
        return
    distillation, teacher = distillation_of(config.algorithm), teacher_of(config)
    if distillation.in_loss:
        tree["algorithm"]["distillation"]["top_k"] = min(distillation.top_k, vocabulary)
    named = [_small(named_teacher.layout, model) | {"name": named_teacher.name} for named_teacher in teacher.named]
    tree["teacher"] = _small(teacher.layout, model) | {"named": named}


def _small(layout: LayoutConfig | None, model: Path) -> dict[str, Any]:
    return {"path": str(model), "layout": None if layout is None else shrunk_layout(layout)}
