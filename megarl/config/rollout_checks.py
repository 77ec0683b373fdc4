"""Checks of the section `rollout` against itself and the rest of the config: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.engine_kinds import EngineCapabilities, declared_capabilities
from megarl.config.option_sections import absent_kind
from megarl.config.rollout import RolloutConfig, ServersConfig
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.option_list import functions, part


def check_rollout(config: Config, engine: EngineCapabilities | None = None) -> None:
    """Raise ConfigError for the first pair of fields that contradict each other.

    `engine`: what the engines are able to do; None: as far as it is known without importing the user's own engine.
    """
    rollout, engine = config.rollout, engine or declared_capabilities(config.rollout)
    if engine.replays and rollout.replay_from is None:
        remedy = "set rollout.replay_from to the samples.jsonl of a run"
        raise ConfigError.needs("rollout.engine = 'replay'", "recorded responses", remedy)
    if not engine.replays and rollout.replay_from is not None:
        raise ConfigError.needs(
            "rollout.replay_from", "rollout.engine = 'replay'", "set rollout.engine, or remove rollout.replay_from"
        )
    if engine.in_process and not engine.replays and rollout.tp > 1:
        reason = f"rollout.engine = '{rollout.engine}' cannot do in one process"
        raise ConfigError.of("rollout.tp", rollout.tp, reason, allowed="1")
    _check_engine_args(config, engine)
    _check_servers(config, engine)
    if rollout.weight_transport == "rdma":
        part("transports", "checks", "rollout.weight_transport = 'rdma'").check_rdma(config, engine)
    _check_schedule(config, engine)
    _check_partial_responses(config, engine)
    _check_sampling_limits(config)
    _check_episode(config, engine)
    _check_routing(config, engine)
    _check_speculative(rollout, engine)
    for check in functions("checks", "check_engines"):
        check(config, engine)


def _check_engine_args(config: Config, engine: EngineCapabilities) -> None:
    rollout, arguments = config.rollout, config.rollout.engine_args
    if arguments and not engine.reads_arguments:
        remedy = "set rollout.engine, or remove rollout.engine_args"
        raise ConfigError.needs("rollout.engine_args", "rollout.engine = 'sglang' or an own engine that reads them", remedy)
    for name in arguments:
        if name in engine.set_elsewhere:
            raise ConfigError(f"rollout.engine_args.{name} is set by {engine.set_elsewhere[name]}; remove it")
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    cache = arguments.get("max_total_tokens")
    if cache is not None and not (type(cache) is int and cache >= longest):
        raise ConfigError.of(
            "rollout.engine_args.max_total_tokens",
            cache,
            f"is less than the {longest} tokens that one sequence can have (data.max_prompt_tokens + rollout.max_new_tokens)"
            if type(cache) is int
            else "",
            allowed=f"a whole number of at least {longest}",
        )


def _check_servers(config: Config, engine: EngineCapabilities) -> None:
    rollout, servers = config.rollout, config.rollout.servers
    of_sglang = [name for name in ServersConfig.model_fields if name != "model_path" or not engine.starts_elsewhere]
    if rollout.engine != "sglang" and (given := [name for name in of_sglang if getattr(servers, name)]):
        remedy = f"set rollout.engine, or remove rollout.servers.{given[0]}"
        raise ConfigError.needs(f"rollout.servers.{given[0]}", "rollout.engine = 'sglang'", remedy)
    last = 65536 - rollout.engines - rollout.lent_engines
    if servers.port is not None and servers.port > last:
        reason = f"leaves too few ports for {65536 - last} engines"
        raise ConfigError.of("rollout.servers.port", servers.port, reason, allowed=f"from 1 to {last}")
    if rollout.weight_transport == "folder" and not servers.urls:
        remedy = "set rollout.servers.urls, or choose another rollout.weight_transport"
        raise ConfigError.needs("rollout.weight_transport = 'folder'", "servers that already run", remedy)
    if not servers.urls:
        return
    if rollout.weight_transport != "folder":
        remedy = "set rollout.weight_transport, or remove rollout.servers.urls"
        raise ConfigError.needs("rollout.servers.urls", "rollout.weight_transport = 'folder'", remedy)
    are_urls = all(url.startswith(("http://", "https://")) for url in servers.urls)
    if not are_urls or len(servers.urls) != rollout.engines:
        allowed = f"a list of rollout.engines = {rollout.engines} URLs that start with http:// or https://"
        raise ConfigError.of("rollout.servers.urls", servers.urls, allowed=allowed)
    for name in ("port", "model_path"):
        if getattr(servers, name) is not None:
            reason = "is for servers that megarl starts, not for those of rollout.servers.urls"
            raise ConfigError.of(f"rollout.servers.{name}", getattr(servers, name), reason, allowed="null")
    if rollout.engine_args:
        raise ConfigError(
            f"rollout.engine_args.{min(rollout.engine_args)} is for servers that megarl starts, not for those of "
            "rollout.servers.urls; remove it"
        )
    if rollout.delta_every:
        reason = "rollout.weight_transport = 'folder' cannot do: it sends whole folders"
        raise ConfigError.of("rollout.delta_every", rollout.delta_every, reason, allowed="0")


def _check_schedule(config: Config, engine: EngineCapabilities) -> None:
    rollout, schedule = config.rollout, config.rollout.schedule
    if schedule.mode != "async" and schedule.max_staleness != 1:
        raise ConfigError.of(
            "rollout.schedule.max_staleness",
            schedule.max_staleness,
            f"can be chosen only with rollout.schedule.mode = 'async', not '{schedule.mode}'",
            allowed="1",
        )
    if schedule.over_sample > rollout.prompts_per_step:
        raise ConfigError.of(
            "rollout.schedule.over_sample",
            schedule.over_sample,
            allowed=f"at most rollout.prompts_per_step = {rollout.prompts_per_step}",
        )
    why = ""
    if engine.replays:
        why = "rollout.engine = 'replay' cannot do: it gives back recorded responses step by step"
    elif config.algorithm.estimator_needs.greedy:
        estimator = f"algorithm.advantage = '{config.algorithm.advantage}'"
        why = f"{estimator} cannot use: its greedy responses come from the weights that are trained"
    if why and schedule.mode != "sync":
        raise ConfigError.of("rollout.schedule.mode", schedule.mode, why, allowed="'sync'")
    if why and schedule.over_sample:
        raise ConfigError.of("rollout.schedule.over_sample", schedule.over_sample, why, allowed="0")


def _check_partial_responses(config: Config, engine: EngineCapabilities) -> None:
    rollout, schedule = config.rollout, config.rollout.schedule
    field, mask = "rollout.schedule.partial_responses", "rollout.schedule.mask_older_tokens"
    if schedule.continues:
        why = ""
        if not engine.continues:
            why = f"asks engines to go on from what they are given, which rollout.engine = '{rollout.engine}' cannot do"
        elif schedule.mode == "one_step_off_policy":
            why = "makes responses of several versions, and with rollout.schedule.mode = 'one_step_off_policy' they have one"
        elif rollout.speculative.algorithm != "none" and not engine.in_process:
            why = "cannot tell which tokens of a draft an engine had looked at when it was cut (rollout.speculative.algorithm)"
        if why:
            raise ConfigError.of(field, "continue", why, allowed="'restart'")
    if not schedule.mask_older_tokens:
        return
    if not schedule.continues:
        raise ConfigError.needs(mask, f"{field} = 'continue'", f"set {field}, or remove {mask}")
    why = ""
    if schedule.mode != "sync":
        why = f"would leave out most of what rollout.schedule.mode = '{schedule.mode}' samples"
    elif config.algorithm.loss_needs.pairs:
        why = f"leaves out tokens, and algorithm.policy_loss = '{config.algorithm.policy_loss}' compares whole responses"
    elif config.algorithm.loss_needs.sequence_ratio:
        why = f"leaves out tokens, and algorithm.policy_loss = '{config.algorithm.policy_loss}' has a ratio of whole responses"
    if why:
        raise ConfigError.of(mask, True, why, allowed="false")


def _check_routing(config: Config, engine: EngineCapabilities) -> None:
    routing = config.policy.routing
    if routing.replay != "none":
        part("routing_replay", "checks", f"policy.routing.replay = '{routing.replay}'").check_replay(config, engine)
    if routing.compare_every and routing.replay != "engine":
        remedy = "set policy.routing.replay, or remove policy.routing.compare_every"
        raise ConfigError.needs("policy.routing.compare_every", "policy.routing.replay = 'engine'", remedy)


def _check_speculative(rollout: RolloutConfig, engine: EngineCapabilities) -> None:
    drafts, section = rollout.speculative, "rollout.speculative"
    if drafts.algorithm == "none":
        given = [name for name, field in type(drafts).model_fields.items() if getattr(drafts, name) != field.default]
        if given:
            remedy = f"set {section}.algorithm, or remove {section}.{given[0]}"
            raise ConfigError.needs(f"{section}.{given[0]}", "speculative decoding", remedy)
        return
    part("prediction", "checks", f"{section}.algorithm = '{drafts.algorithm}'").check_drafting(rollout, engine)


def _check_sampling_limits(config: Config) -> None:
    for name, value in config.rollout.sampling_limits.items():
        why = ""
        if config.algorithm.bypasses_old_log_probs:
            why = "needs the trainer's log-probs before the update, which algorithm.rollout_correction = 'bypass' leaves out"
        if why:
            off = type(config.rollout).model_fields[name].default
            raise ConfigError.of(f"rollout.{name}", value, why, allowed=str(off))


def _check_episode(config: Config, engine: EngineCapabilities) -> None:
    episode = config.rollout.episode
    if (sentence := absent_kind(episode.kind)) is not None:
        raise ConfigError(sentence)
    if episode.kind == "single" and episode.tools:
        raise ConfigError.needs(
            "rollout.episode.tools",
            "an episode that calls them",
            "set rollout.episode.kind to 'tools', or remove rollout.episode.tools",
        )
    if episode.turn_cache_bytes != type(episode).model_fields["turn_cache_bytes"].default and not engine.keeps_turns:
        reason = f"is the room of rollout.engine = 'embedded', and rollout.engine = '{config.rollout.engine}' has its own"
        allowed = "left out (SGLang: rollout.engine_args.max_total_tokens or mem_fraction_static)"
        raise ConfigError.of("rollout.episode.turn_cache_bytes", episode.turn_cache_bytes, reason, allowed=allowed)
    if episode.kind != "single" and engine.replays:
        why = "rollout.engine = 'replay' cannot do: it gives back whole responses"
        raise ConfigError.of("rollout.episode.kind", episode.kind, why, allowed="'single'")
    if episode.kind != "single" and config.algorithm.estimator_needs.greedy:
        why = f"algorithm.advantage = '{config.algorithm.advantage}' cannot use: it compares with one greedy turn"
        raise ConfigError.of("rollout.episode.kind", episode.kind, why, allowed="'single'")
