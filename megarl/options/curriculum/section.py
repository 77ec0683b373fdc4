"""The section `data.curriculum`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Decay, Fraction, Positive, Section


class StageConfig(Section):
    """A stage of a curriculum: the rows whose difficulty is within bounds."""

    steps: Positive | None = None
    """Number of steps of the stage. null: all that follow, for the last stage."""
    min: float | None = None
    """Minimum of the number under `curriculum.key`. null: none."""
    max: float | None = None
    """Maximum of the number under `curriculum.key`. null: none."""


class CurriculumConfig(Section):
    """In which order training rows come, and which are left out for a while (docs/data.md#curricula)."""

    key: str | None = None
    """Key of a number in a row, its difficulty. null: none."""
    order: Literal["shuffled", "ascending", "descending"] = "shuffled"
    """Order of the rows of an epoch, by difficulty; rows of equal difficulty are shuffled."""
    ordered_epochs: Positive | None = None
    """Number of epochs in this order; later ones are shuffled. null: all."""
    stages: Annotated[tuple[StageConfig, ...], Field(strict=False)] = ()
    """Stages by difficulty, one after the other."""
    min_pass_rate: Fraction | None = None
    """Leave rows out for some epochs whose running pass rate is below this (reinforcement learning). null: none."""
    max_pass_rate: Fraction | None = None
    """Leave rows out for some epochs whose running pass rate is above this (reinforcement learning). null: none."""
    pass_rate_memory: Decay = 0.5
    """Weight of earlier visits in a row's running pass rate. 0: only the last visit counts."""
    pause_epochs: Positive = 1
    """Number of epochs for which such a row is left out."""

    @property
    def bounds_pass_rates(self) -> bool:
        """Return whether rows are left out for their pass rate."""
        return self.min_pass_rate is not None or self.max_pass_rate is not None


DESCRIPTION = "In which order training rows come, and which are left out for a while."
FIELDS = tuple(
    AddedField(data, "curriculum", CurriculumConfig, CurriculumConfig(), DESCRIPTION)
    for data in ("DataConfig", "SupervisedDataConfig")
)
curriculum_of = FIELDS[0].of
"""The section `curriculum` of a section `data`."""
