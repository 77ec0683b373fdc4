"""The answer of routing replay to a question that is asked of every config."""

from __future__ import annotations

from typing import Literal

from megarl.config.sections import PolicyConfig
from megarl.options.routing_replay.section import routing_of


def routing_replay(policy: PolicyConfig) -> Literal["none", "old_policy", "engine"]:
    """Name of the pass whose choice of experts the policy replays."""
    return routing_of(policy).replay
