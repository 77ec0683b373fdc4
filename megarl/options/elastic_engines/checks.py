"""Checks of engines that come and go: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.engine_kinds import NOT_YET_KNOWN, EngineCapabilities
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.elastic_engines.section import SitesConfig, max_engines_of, sites_of

FIELD = "rollout.max_engines"
SITES = "rollout.sites"
LAST_PORT = 65535


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Raise ConfigError for what engines that come and go do not go with."""
    rollout, most = config.rollout, max_engines_of(config.rollout)
    if (sites := sites_of(rollout)) is not None:
        _check_sites(config, sites)
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


def _check_sites(config: Config, sites: SitesConfig) -> None:
    """Raise ConfigError for what engines of other sites do not go with."""
    rollout, most = config.rollout, max_engines_of(config.rollout)
    if most is None:
        remedy = "set rollout.engines to {min, max}, or remove rollout.sites"
        raise ConfigError.needs(SITES, "engines that come and go", remedy)
    if rollout.engines + sites.engines > most:
        reason = f"leaves less than rollout.engines = {rollout.engines} of rollout.max_engines = {most} to the run's own nodes"
        allowed = f"at most {most - rollout.engines}" if most > rollout.engines else "left out, or rollout.max_engines larger"
        rule = "leaves too few engines to the run's own nodes"
        raise ConfigError.of(f"{SITES}.engines", sites.engines, reason, allowed=allowed, rule=rule)
    why = ""
    if rollout.engine != "embedded":
        why = f"needs engines that give their weights to each other, as rollout.engine = '{rollout.engine}' does not"
    elif rollout.drafts is not None:
        why = "does not go with engines that draft (rollout.speculative)"
    elif rollout.servers.model_path is not None:
        why = "does not go with weights in few bits (rollout.servers.model_path)"
    elif config.sends_adapters:
        why = "does not go with adapters that engines add (policy.lora.sync)"
    if why:
        raise ConfigError.of(SITES, "set", why, allowed="null", rule=why)
