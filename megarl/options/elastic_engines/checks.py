"""Checks of engines that come and go: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.engine_kinds import NOT_YET_KNOWN, EngineCapabilities
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.elastic_engines.section import max_engines_of

FIELD = "rollout.max_engines"
LAST_PORT = 65535


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Raise ConfigError for what engines that come and go do not go with."""
    rollout, most = config.rollout, max_engines_of(config.rollout)
    if most is None:
        return
    if most < rollout.engines:
        reason, allowed = f"is below rollout.engines = {rollout.engines}", f"at least {rollout.engines}"
        raise ConfigError.of(FIELD, most, reason, allowed=allowed, rule="is below rollout.engines")
    if config.resources.placement != "separate":
        remedy = f"set resources.placement to 'separate', or rollout.engines to a number ({FIELD} to null)"
        raise ConfigError.needs(FIELD, "engines with places of their own", remedy)
    why = ""
    if rollout.lent_engines:
        why = "does not go with engines that are lent the trainer's GPUs (rollout.schedule.lent_engines)"
    elif engine.weights not in ("slices", "tensors"):
        why = f"asks for engines that megarl starts and sends weights to, which rollout.engine = '{rollout.engine}' "
        why += "does not have" if engine.weights == "nothing" else "on servers that run already does not have"
    elif engine.weights == "slices" and engine is not NOT_YET_KNOWN and rollout.weight_transport == "shared_memory":
        why = "lets engines come on other machines, where rollout.weight_transport = 'shared_memory' does not reach them "
        why += "('process_group' and 'rdma' do)"
    elif getattr(config, "serve", None) is not None:
        why = "is not for `megarl serve`, whose clients count on its engines"
    elif rollout.servers.port is not None and rollout.servers.port > LAST_PORT - most:
        why = f"leaves too few ports from rollout.servers.port = {rollout.servers.port} on"
    if why:
        raise ConfigError.of(FIELD, most, why, allowed="null", rule=why.partition(" ")[2])
