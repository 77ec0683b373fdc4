"""Checks of the section `rollout` against itself and the rest of the config: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.engine_kinds import EngineCapabilities, declared_capabilities
from megarl.config.option_sections import absent_kind
from megarl.config.rollout import ServersConfig
from megarl.config.schema import Config
from megarl.config.stop_checks import check_config_stops
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
        raise ConfigError.needs_set("rollout.replay_from", "rollout.engine = 'replay'", "rollout.engine")
    if engine.in_process and not engine.replays and rollout.tp > 1:
        reason = f"rollout.engine = '{rollout.engine}' cannot do in one process"
        raise config.refusal("rollout.tp", reason, allowed="1")
    _check_engine_args(config, engine)
    _check_servers(config, engine)
    if rollout.weight_transport == "rdma":
        part("transports", "checks", "rollout.weight_transport = 'rdma'").check_rdma(config, engine)
    _check_schedule(config, engine)
    _check_partial_responses(config, engine)
    _check_sampling_limits(config)
    check_config_stops(config)
    _check_episode(config, engine)
    for check in functions("checks", "check_engines"):
        check(config, engine)


def _check_engine_args(config: Config, engine: EngineCapabilities) -> None:
    rollout, arguments = config.rollout, config.rollout.engine_args
    if arguments and not engine.reads_arguments:
        what = "rollout.engine = 'sglang' or an own engine that reads them"
        raise ConfigError.needs_set("rollout.engine_args", what, "rollout.engine")
    for name in arguments:
        if name in engine.set_elsewhere:
            raise ConfigError(f"rollout.engine_args.{name} is set by {engine.set_elsewhere[name]}; remove it")
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    cache = arguments.get("max_total_tokens")
    if cache is not None and not (type(cache) is int and cache >= longest):
        reason = (
            f"is less than the {longest} tokens that one sequence can have (data.max_prompt_tokens + rollout.max_new_tokens)"
        )
        field, allowed = "rollout.engine_args.max_total_tokens", f"a whole number of at least {longest}"
        raise config.refusal(field, reason if type(cache) is int else "", allowed=allowed)


def _check_servers(config: Config, engine: EngineCapabilities) -> None:
    rollout, servers = config.rollout, config.rollout.servers
    of_sglang = [name for name in ServersConfig.model_fields if name != "model_path" or not engine.starts_elsewhere]
    if rollout.engine != "sglang" and (set_fields := [name for name in of_sglang if getattr(servers, name)]):
        raise ConfigError.needs_set(f"rollout.servers.{set_fields[0]}", "rollout.engine = 'sglang'", "rollout.engine")
    last = 65536 - rollout.engines - rollout.lent_engines
    if servers.port is not None and servers.port > last:
        reason = f"leaves too few ports for {65536 - last} engines"
        raise config.refusal("rollout.servers.port", reason, allowed=f"from 1 to {last}")
    if rollout.weight_transport == "folder" and not servers.urls:
        remedy = "set rollout.servers.urls, or choose another rollout.weight_transport"
        raise ConfigError.needs("rollout.weight_transport = 'folder'", "servers that already run", remedy)
    if not servers.urls:
        return
    if rollout.weight_transport != "folder":
        what = "rollout.weight_transport = 'folder'"
        raise ConfigError.needs_set("rollout.servers.urls", what, "rollout.weight_transport")
    are_urls = all(url.startswith(("http://", "https://")) for url in servers.urls)
    if not are_urls or len(servers.urls) != rollout.engines:
        allowed = f"a list of rollout.engines = {rollout.engines} URLs that start with http:// or https://"
        raise config.refusal("rollout.servers.urls", allowed=allowed)
    for name in ("port", "model_path"):
        if getattr(servers, name) is not None:
            reason = "is for servers that megarl starts, not for those of rollout.servers.urls"
            raise config.refusal(f"rollout.servers.{name}", reason, allowed="null")
    if rollout.engine_args:
        raise ConfigError(
            f"rollout.engine_args.{min(rollout.engine_args)} is for servers that megarl starts, not for those of "
            "rollout.servers.urls; remove it"
        )
    if rollout.delta_every:
        reason = "rollout.weight_transport = 'folder' cannot do: it sends whole folders"
        raise config.refusal("rollout.delta_every", reason, allowed="0")


def _check_schedule(config: Config, engine: EngineCapabilities) -> None:
    rollout, schedule = config.rollout, config.rollout.schedule
    if schedule.mode != "async" and schedule.max_staleness != 1:
        reason = f"can be chosen only with rollout.schedule.mode = 'async', not '{schedule.mode}'"
        raise config.refusal("rollout.schedule.max_staleness", reason, allowed="1")
    if schedule.over_sample > rollout.prompts_per_step:
        allowed = f"at most rollout.prompts_per_step = {rollout.prompts_per_step}"
        raise config.refusal("rollout.schedule.over_sample", allowed=allowed)
    why = ""
    if engine.replays:
        why = "rollout.engine = 'replay' cannot do: it gives back recorded responses step by step"
    elif config.algorithm.estimator_needs.greedy:
        estimator = f"algorithm.advantage = '{config.algorithm.advantage}'"
        why = f"{estimator} cannot use: its greedy responses come from the weights that are trained"
    if why and schedule.mode != "sync":
        raise config.refusal("rollout.schedule.mode", why, allowed="'sync'")
    if why and schedule.over_sample:
        raise config.refusal("rollout.schedule.over_sample", why, allowed="0")


def _check_partial_responses(config: Config, engine: EngineCapabilities) -> None:
    rollout, schedule = config.rollout, config.rollout.schedule
    field, mask = "rollout.schedule.partial_responses", "rollout.schedule.mask_older_tokens"
    if schedule.continues:
        why, (by, allowed) = "", schedule.continues_by
        if not engine.continues:
            why = f"asks engines to go on from what they are given, which rollout.engine = '{rollout.engine}' cannot do"
        elif schedule.mode == "one_step_off_policy":
            why = "makes responses of several versions, and with rollout.schedule.mode = 'one_step_off_policy' they have one"
        if why:
            raise config.refusal(f"rollout.schedule.{by}", why, allowed=allowed)
    elif schedule.over_sample:
        why = f"makes steps longer with rollout.schedule.over_sample = {schedule.over_sample}, never shorter: groups that were "
        why += "passed over begin anew, and the next step waits for them"
        raise config.refusal(field, why, allowed="'continue' or null")
    if not schedule.mask_older_tokens:
        return
    if not schedule.continues:
        raise ConfigError.needs_set(mask, f"{field} = 'continue'", field)
    why = ""
    if schedule.mode != "sync":
        why = f"would leave out most of what rollout.schedule.mode = '{schedule.mode}' samples"
    elif config.algorithm.loss_needs.pairs:
        why = f"leaves out tokens, and algorithm.policy_loss = '{config.algorithm.policy_loss}' compares whole responses"
    elif config.algorithm.loss_needs.sequence_ratio:
        why = f"leaves out tokens, and algorithm.policy_loss = '{config.algorithm.policy_loss}' has a ratio of whole responses"
    if why:
        raise config.refusal(mask, why, allowed="false")


def _check_sampling_limits(config: Config) -> None:
    for name in config.rollout.sampling_limits if config.algorithm.bypasses_old_log_probs else ():
        why = "needs the trainer's log-probs before the update, which algorithm.rollout_correction = 'bypass' leaves out"
        raise config.refusal(f"rollout.{name}", why, allowed=str(type(config.rollout).model_fields[name].default))


def _check_episode(config: Config, engine: EngineCapabilities) -> None:
    episode = config.rollout.episode
    if (sentence := absent_kind(episode.kind)) is not None:
        raise ConfigError(sentence)
    if episode.kind == "single" and episode.tools:
        setting = "rollout.episode.kind to 'tools'"
        raise ConfigError.needs_set("rollout.episode.tools", "an episode that calls them", setting)
    if episode.turn_cache_bytes != type(episode).model_fields["turn_cache_bytes"].default and not engine.keeps_turns:
        reason = f"is the room of rollout.engine = 'embedded', and rollout.engine = '{config.rollout.engine}' has its own"
        allowed = "left out (SGLang: rollout.engine_args.max_total_tokens or mem_fraction_static)"
        raise config.refusal("rollout.episode.turn_cache_bytes", reason, allowed=allowed)
    if episode.kind != "single" and engine.replays:
        why = "rollout.engine = 'replay' cannot do: it gives back whole responses"
        raise config.refusal("rollout.episode.kind", why, allowed="'single'")
    if episode.kind != "single" and config.algorithm.estimator_needs.greedy:
        why = f"algorithm.advantage = '{config.algorithm.advantage}' cannot use: it compares with one greedy turn"
        raise config.refusal("rollout.episode.kind", why, allowed="'single'")
