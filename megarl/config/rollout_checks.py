"""Checks of the section `rollout` against itself and the rest of the config: one sentence per contradiction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.yaml_tree import describe_value
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.schema import Config

SET_ELSEWHERE = {
    "dtype": "model.dtype",
    "tp_size": "rollout.tp",
    "device": "the machine that the run is on",
    "host": "megarl, whose servers listen on this machine alone",
    "weight_version": "megarl, which counts the weights' versions",
    "skip_tokenizer_init": "megarl, which sends and takes token ids",
    "custom_weight_loader": "megarl, which sends the weights",
}
"""SGLang's server arguments that `rollout.engine_args` cannot have, and what sets them."""


def check_rollout(config: Config) -> None:
    """Raise ConfigError for the first pair of fields that contradict each other."""
    rollout = config.rollout
    if rollout.engine == "replay" and rollout.replay_from is None:
        raise ConfigError("rollout.replay_from is null, but rollout.engine = 'replay' needs the samples.jsonl of a run")
    if rollout.engine != "replay" and rollout.replay_from is not None:
        raise ConfigError(
            f"rollout.replay_from is '{rollout.replay_from}', but rollout.engine is '{rollout.engine}'; only 'replay' reads it"
        )
    if rollout.engine == "embedded" and rollout.tp > 1:
        raise ConfigError(f"rollout.tp is {rollout.tp}, but rollout.engine = 'embedded' runs in one process; it may be 1")
    _check_engine_args(config)
    _check_urls(config)
    _check_schedule(config)
    _check_episode(config)


def _check_engine_args(config: Config) -> None:
    rollout, arguments = config.rollout, config.rollout.engine_args
    if arguments and rollout.engine != "sglang":
        raise ConfigError(
            f"rollout.engine_args has {', '.join(arguments)}, but rollout.engine is '{rollout.engine}'; only 'sglang' reads it"
        )
    for name in arguments:
        if name in SET_ELSEWHERE:
            raise ConfigError(f"rollout.engine_args has {name}, which is set by {SET_ELSEWHERE[name]}; leave it out here")
    port = arguments.get("port")
    if port is not None and not (type(port) is int and 1 <= port <= 65536 - rollout.engines):
        raise ConfigError(
            f"rollout.engine_args.port is {port!r}, but it may be a whole number from 1 to {65536 - rollout.engines}"
        )
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    cache = arguments.get("max_total_tokens")
    if cache is not None and not (type(cache) is int and cache >= longest):
        raise ConfigError(
            f"rollout.engine_args.max_total_tokens is {cache!r}, but one sequence may have {longest} tokens "
            f"(data.max_prompt_tokens + rollout.max_new_tokens); it may be {longest} or more"
        )


def _check_urls(config: Config) -> None:
    rollout, urls = config.rollout, config.rollout.engine_args.get("urls")
    if (urls is None) != (rollout.sync != "disk"):
        has = "has no urls" if urls is None else "has urls"
        raise ConfigError(
            f"rollout.engine_args {has}, but rollout.sync is '{rollout.sync}'; servers that run already are named by urls and "
            "take their weights by 'disk', and no others do"
        )
    if urls is None:
        return
    is_list = isinstance(urls, list) and all(isinstance(url, str) and url.startswith(("http://", "https://")) for url in urls)
    if not is_list or len(urls) != rollout.engines:
        raise ConfigError(
            f"rollout.engine_args.urls is {describe_value(urls)}, but it must list as many http:// addresses as "
            f"rollout.engines = {rollout.engines} says"
        )
    if others := sorted(rollout.engine_args.keys() - {"urls"}):
        raise ConfigError(f"rollout.engine_args has {others[0]} beside urls, but servers that run already have their arguments")
    if rollout.delta_every:
        raise ConfigError(
            f"rollout.delta_every is {rollout.delta_every}, but rollout.sync = 'disk' sends whole folders; it may be 0"
        )


def _check_schedule(config: Config) -> None:
    rollout, schedule = config.rollout, config.rollout.schedule
    if schedule.mode != "async" and schedule.staleness != 1:
        raise ConfigError(
            f"rollout.schedule.staleness is {schedule.staleness}, but rollout.schedule.mode is '{schedule.mode}', which fixes "
            "it; only 'async' has a choice"
        )
    if schedule.over_sample > rollout.prompts_per_step:
        raise ConfigError(
            f"rollout.schedule.over_sample is {schedule.over_sample}, but it may be at most rollout.prompts_per_step = "
            f"{rollout.prompts_per_step}"
        )
    if rollout.engine == "replay" and (schedule.mode != "sync" or schedule.over_sample):
        field = "mode" if schedule.mode != "sync" else "over_sample"
        raise ConfigError(
            f"rollout.schedule.{field} is {getattr(schedule, field)!r}, but rollout.engine = 'replay' gives back recorded "
            "responses step by step; mode may be 'sync', with over_sample 0"
        )
    if config.algorithm.advantage == "remax" and (schedule.mode != "sync" or schedule.over_sample):
        raise ConfigError(
            "algorithm.advantage is 'remax', whose greedy responses must come from the weights that are trained; "
            "rollout.schedule.mode may be 'sync', with over_sample 0"
        )


def _check_episode(config: Config) -> None:
    episode, engine = config.rollout.episode, config.rollout.engine
    if episode.kind == "single" and episode.tools:
        raise ConfigError(
            f"rollout.episode.tools has {', '.join(episode.tools)}, but rollout.episode.kind is 'single', which calls no tools"
        )
    if episode.kind in ("tools", "environment") and not episode.tools:
        needs = "at least one function" if episode.kind == "tools" else "the environment's class"
        raise ConfigError(
            f"rollout.episode.tools is empty, but rollout.episode.kind = '{episode.kind}' needs {needs} as "
            "'package.module:name'"
        )
    if episode.kind != "single" and engine == "replay":
        raise ConfigError(
            f"rollout.episode.kind is '{episode.kind}', but rollout.engine = 'replay' gives back whole responses; it may be "
            "'single'"
        )
    if episode.kind != "single" and config.algorithm.advantage == "remax":
        raise ConfigError(
            f"rollout.episode.kind is '{episode.kind}', but algorithm.advantage = 'remax' compares with one greedy turn; it "
            "may be 'single'"
        )
