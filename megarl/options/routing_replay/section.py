"""The section `policy.routing`. Importable without torch."""

from __future__ import annotations

from typing import Literal

from megarl.config.option_sections import AddedField
from megarl.config.section import Count, Section


class RoutingConfig(Section):
    """Choice of the experts that the policy's tokens go to (docs/rollouts.md#routing-replay)."""

    replay: Literal["none", "old_policy", "engine"] = "none"
    """`none`: the router chooses anew in every pass. `old_policy` (R2): as in the pass that computes the old log-probs.
    `engine` (R3): as in the engine that sampled the response."""
    compare_every: Count = 0
    """With `engine`: every this many steps compute the old log-probs without replay, too, and log how far they are from the
    engine's. 0: never."""


ROUTING = AddedField("PolicyConfig", "routing", RoutingConfig, RoutingConfig(), "Routing replay, for a mixture of experts.")
FIELDS = (ROUTING,)
routing_of = ROUTING.of
"""The section `policy.routing`."""
