"""Checks of `rollout.schedule.lent_engines`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.engine_kinds import EngineCapabilities, declared_capabilities
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.lending.questions import with_lent
from megarl.options.lending.section import lent_engines_of


def with_lent_engines(config: Config, count: int) -> Config | None:
    """The config with so many lent engines; None: it cannot have any."""
    lending = with_lent(config, count)
    try:
        check_engines(lending, declared_capabilities(config.rollout))
    except ConfigError:
        return None
    return lending if count else None


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Raise ConfigError for what engines on the trainer's GPUs do not go with."""
    rollout, field = config.rollout, "rollout.schedule.lent_engines"
    lent = lent_engines_of(rollout.schedule)
    if not lent:
        return
    if config.resources.placement != "separate":
        remedy = f"set resources.placement to 'separate', or remove {field}: colocated engines have the trainer's GPUs already"
        raise ConfigError.needs(field, "a trainer with GPUs of its own", remedy)
    if rollout.schedule.mode != "async":
        remedy = f"set rollout.schedule.mode to 'async', or remove {field}: in other modes no response spans two engines"
        raise ConfigError.needs(field, "responses that go on elsewhere when the trainer takes its GPUs back", remedy)
    why, trainers = "", sum(layout.world_size for layout in config.layouts.values())
    if not (engine.lent and engine.continues):
        why = f"asks engines to sleep and to go on with what was cut, which rollout.engine = '{rollout.engine}' cannot do"
        why += " on servers that run already" if engine.weights == "folder" else ""
    elif rollout.weight_transport != "shared_memory":
        why = f"are sent weights on their own GPU, and rollout.weight_transport is '{rollout.weight_transport}'"
    elif rollout.engine_args.get("enable_memory_saver") is False:
        why = "give up memory, which rollout.engine_args.enable_memory_saver = false forbids"
    elif config.sends_adapters:
        why = "wake up without the weights that adapters are added to (policy.lora.sync = 'adapters')"
    elif rollout.drafts is not None and not engine.in_process:
        why = "cannot tell which tokens of a draft they had looked at when they were cut (rollout.speculative.algorithm)"
    elif rollout.episode.kind == "agent":
        why = "would have an agent's episode begin anew whenever the trainer takes its GPUs back"
    elif lent * rollout.tp > trainers:
        why = f"of rollout.tp = {rollout.tp} have no room on the trainer's {trainers} GPUs"
    if why:
        most = trainers // rollout.tp if lent * rollout.tp > trainers else 0
        raise ConfigError.of(field, lent, why, allowed=f"at most {most}" if most else "0")
