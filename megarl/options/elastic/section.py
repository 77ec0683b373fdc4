"""The fields `resources.spares` and `resources.shrink`."""

from __future__ import annotations

from megarl.config.option_sections import AddedField
from megarl.config.section import Count

DESCRIPTION = (
    "Processes, each with a place of its own, that wait to replace lost ranks; the step is computed again from memory. 0: new "
    "ones are started in their places. null: the run starts again from disk."
)
SPARES: AddedField[int | None] = AddedField("ResourcesConfig", "spares", Count | None, None, DESCRIPTION)
SHRINK: AddedField[bool] = AddedField(
    "ResourcesConfig",
    "shrink",
    bool,
    False,
    "Go on with fewer data-parallel replicas where there is no place for lost ranks, until there is one. Needs `spares`.",
)
FIELDS = (SPARES, SHRINK)
spares_of = SPARES.of
"""Number of spare processes that a section `resources` asks for; None: lost ranks are not replaced."""
shrinks = SHRINK.of
"""Whether a section `resources` lets a run go on with fewer replicas."""
