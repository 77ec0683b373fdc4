"""Supervised examples in a run: a batch of them joins every update of the policy."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.options.ptx.examples import PtxExamples
from megarl.options.ptx.section import ptx_of

SUMMED = ("ptx/loss",)
"""Metrics of updates whose sum is the value itself."""


def take_part(config: Config, tokenizer: Any) -> PtxExamples | None:
    """The examples that `ptx` asks for."""
    return PtxExamples(config, tokenizer) if ptx_of(config).coef else None
