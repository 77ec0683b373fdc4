"""The fields `resources.spares`, `resources.shrink`, `resources.compare_replicas` and `resources.slow_ranks`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
    "Go on with fewer data-parallel replicas where there is no place for lost ranks, until there is one; restarts too. "
    "Needs `spares`.",
)
COMPARE: AddedField[int] = AddedField(
    "ResourcesConfig",
    "compare_replicas",
    Count,
    0,
    "Compare weights of replicas in every so many steps; a rank that differs is replaced, and the step computed again. "
    "0: never. Needs `spares`.",
)
SLOW: AddedField[float | None] = AddedField(
    "ResourcesConfig",
    "slow_ranks",
    Annotated[float, Field(gt=0)] | None,
    0.05,
    "Name a rank whose own work on a token takes longer than the median of its peers' by more than this share, over 20 steps. "
    "null: nobody is asked.",
)
FIELDS = (SPARES, SHRINK, COMPARE, SLOW)
spares_of = SPARES.of
"""Number of spare processes that a section `resources` asks for; None: lost ranks are not replaced."""
shrinks = SHRINK.of
"""Whether a section `resources` lets a run go on with fewer replicas."""
compared_every = COMPARE.of
"""Steps from one comparison of replicas to the next, of a section `resources`; 0: none."""
slow_share_of = SLOW.of
"""The share behind its peers from which on a section `resources` has a rank named; None: no rank is."""
