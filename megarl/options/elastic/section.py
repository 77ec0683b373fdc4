"""The fields `resources.spares`, `resources.shrink` and `resources.compare_replicas`."""

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
COMPARE: AddedField[int] = AddedField(
    "ResourcesConfig",
    "compare_replicas",
    Count,
    0,
    "Compare weights of replicas behind every so many steps; a rank that differs is replaced, and the step computed again. "
    "0: never. Needs `spares`.",
)
FIELDS = (SPARES, SHRINK, COMPARE)
spares_of = SPARES.of
"""Number of spare processes that a section `resources` asks for; None: lost ranks are not replaced."""
shrinks = SHRINK.of
"""Whether a section `resources` lets a run go on with fewer replicas."""
compared_every = COMPARE.of
"""Steps from one comparison of replicas to the next, of a section `resources`; 0: none."""
