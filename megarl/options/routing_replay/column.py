"""The column `routes`: the experts that an engine chose for each token."""

from __future__ import annotations

from megarl.data.columns import Column, TokenRules
from megarl.options.routing_replay.routes import agreed, from_json, kept, of_one_version, to_json

COLUMN = Column(
    "routes",
    then=kept,
    to_json=to_json,
    from_json=from_json,
    is_asked=lambda config: config.routing_replay == "engine",
    tokens=TokenRules(agreed, of_one_version),
)
