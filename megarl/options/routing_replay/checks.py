"""Contradictions of `policy.routing` with the rest of a config."""

from __future__ import annotations

from megarl.config import Config, SupervisedConfig
from megarl.config.engine_kinds import EngineCapabilities
from megarl.config.megatron_options import keep_all_choices
from megarl.errors import ConfigError
from megarl.options.routing_replay.section import routing_of


def check(config: Config) -> None:
    """Refuse replay of choices that are dropped.

    Raises:
        ConfigError: names the field.
    """
    replay = routing_of(config.policy).replay
    if replay != "none":
        keep_all_choices("policy", config.policy, f"policy.routing.replay = '{replay}'")


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Refuse replay of what nobody records.

    Raises:
        ConfigError: names the field.
    """
    routing, field = routing_of(config.policy), "policy.routing.replay"
    if routing.replay == "old_policy" and not config.needs_old_log_probs:
        reason = "replays the pass that computes old log-probs, and this run has none: a step's only update needs no replay"
        raise config.refusal(field, reason, allowed="'none' or 'engine'")
    if routing.replay == "engine" and not engine.routes:
        reason = f"asks engines for the experts that they chose, which rollout.engine = '{config.rollout.engine}' cannot say"
        raise config.refusal(field, reason, allowed="'none' or 'old_policy'")
    if routing.compare_every and routing.replay != "engine":
        raise ConfigError.needs_set("policy.routing.compare_every", f"{field} = 'engine'", field)


def check_supervised(config: SupervisedConfig) -> None:
    """Refuse replay where responses are given."""
    if routing_of(config.policy).replay != "none":
        reason = "only reinforcement learning has: no engine and no earlier pass chose experts for rows"
        raise config.refusal("policy.routing.replay", reason, allowed="'none'")
