"""The field `rollout.schedule.lent_engines`."""

from __future__ import annotations

from megarl.config.option_sections import AddedField
from megarl.config.section import Count, Section

FIELDS = (
    AddedField(
        "ScheduleConfig",
        "lent_engines",
        Count,
        0,
        "Further engines, on the trainer's GPUs: they sleep while it works and generate while it waits for samples. Needs "
        "`async` and `resources.placement: separate` (docs/rollouts.md). 0: none.",
    ),
)


def lent_engines_of(schedule: Section) -> int:
    """The number of lent engines in a section `rollout.schedule`."""
    return getattr(schedule, "lent_engines")  # noqa: B009 - a field that this option adds
