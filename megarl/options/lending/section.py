"""The field `rollout.schedule.lent_engines`."""

from __future__ import annotations

from megarl.config.option_sections import AddedField
from megarl.config.section import Count

DESCRIPTION = (
    "Further engines, on the trainer's GPUs: they sleep while it works and generate while it waits for samples. Needs "
    "`async` and `resources.placement: separate` (docs/rollouts.md). 0: none."
)
LENT_ENGINES = AddedField("ScheduleConfig", "lent_engines", Count, 0, DESCRIPTION)
FIELDS = (LENT_ENGINES,)
lent_engines_of = LENT_ENGINES.of
"""The number of lent engines in a section `rollout.schedule`."""
