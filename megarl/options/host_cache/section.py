"""The field `rollout.host_cache_gb`."""

from __future__ import annotations

from megarl.config.option_sections import AddedField
from megarl.config.section import Count

DESCRIPTION = (
    "Main memory in GB (10^9 bytes) of each rank of an SGLang engine for keys and values that its GPU has no room for, "
    "copied back when a prompt begins with them (docs/rollouts.md). 0: none."
)
HOST_CACHE_GB = AddedField("RolloutConfig", "host_cache_gb", Count, 0, DESCRIPTION)
FIELDS = (HOST_CACHE_GB,)
host_cache_gb_of = HOST_CACHE_GB.of
"""GB of main memory of a rank in a section `rollout`."""
