"""Teachers in a run: they are asked in every step, and advantages or the loss have a term of theirs."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.options.distillation.questions import needs_teacher
from megarl.options.distillation.teachers import Teachers


def take_part(config: Config, tokenizer: Any) -> Teachers | None:
    """The teachers of a run that has any."""
    return Teachers(config) if needs_teacher(config) else None
