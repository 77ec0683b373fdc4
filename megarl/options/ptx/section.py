"""The section `ptx`."""

from __future__ import annotations

from typing import Literal

from megarl.config.option_sections import AddedField
from megarl.config.section import NonNegative, Positive, Section
from megarl.config.sources import SourceConfig


class PtxConfig(Section):
    """Supervised examples in every policy update, as in InstructGPT's PPO-ptx (docs/methods.md#supervised-mix-ptx)."""

    coef: NonNegative = 0.0
    """Weight of the examples' mean cross-entropy per token in the policy loss. 0: off."""
    samples_per_step: Positive = 8
    """Number of rows per pass over a step's sequences, divided among its mini-batches."""
    turns: Literal["together", "each", "last"] = "together"
    """Samples of a conversation, as in `data.turns` of supervised training."""
    data: SourceConfig | None = None
    """Rows with the keys `data.prompt_key` and `response`; `columns` renames other keys. null: none."""


PTX = AddedField("Config", "ptx", PtxConfig, PtxConfig(), "Supervised examples in every policy update.")
FIELDS = (PTX,)
ptx_of = PTX.of
"""The section `ptx` of a run's config."""
