"""Contradictions of `policy.routing.replay` with the rest of a config."""

from __future__ import annotations

from megarl.config import Config
from megarl.config.engine_kinds import EngineCapabilities
from megarl.errors import ConfigError


def check_replay(config: Config, engine: EngineCapabilities) -> None:
    """Refuse replay of what nobody records.

    Raises:
        ConfigError: names the field.
    """
    routing, rollout = config.policy.routing, config.rollout
    if routing.replay == "old_policy" and not config.needs_old_log_probs:
        reason = "replays the pass that computes old log-probs, and this run has none: a step's only update needs no replay"
        raise ConfigError.of("policy.routing.replay", "old_policy", reason, allowed="'none' or 'engine'")
    if routing.replay == "engine" and not engine.routes:
        reason = f"asks engines for the experts that they chose, which rollout.engine = '{rollout.engine}' cannot say"
        raise ConfigError.of("policy.routing.replay", "engine", reason, allowed="'none' or 'old_policy'")
