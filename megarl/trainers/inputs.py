"""The user's inputs of reinforcement learning, read whole before ranks or engines start; training and evaluation read it."""

from __future__ import annotations

import os
from contextlib import ExitStack

from megarl import platform
from megarl.algorithms import ADVANTAGES, POLICY_LOSSES
from megarl.config import Config
from megarl.config.evaluations import EvaluationConfig
from megarl.config.stop_checks import stops_of
from megarl.data.held_out import drop_eval_overlap
from megarl.data.mixture import build_parts
from megarl.data.prompts import rows_of
from megarl.data.row_media import open_media
from megarl.data.rows import Origin
from megarl.data.stop_finder import check_stops_of
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import ModelError
from megarl.experience.inputs import EvaluationSet, RlInputs
from megarl.experience.step_parts import open_parts
from megarl.models.registry import architecture_for, load_hf_config
from megarl.rewards import build_rewards
from megarl.rewards.trial import try_sources
from megarl.rollout.engines.registry import check_engine
from megarl.rollout.episodes import open_episodes
from megarl.supervise.child_run import is_restart
from megarl.trainers.start import check_architectures


def read_inputs(config: Config, *, train: bool = True) -> RlInputs:
    """Tokenizer, rows, prompts and rewards of `config`, each looked at whole; without `train` held-out rows alone.

    Raises:
        MegarlError: whatever is wrong with them or with the classes and functions that the config names, as one sentence.
    """
    check_architectures(config)
    ADVANTAGES.resolve(config.algorithm.advantage, config.algorithm.advantage_args)
    if not config.algorithm.loss_needs.pairs:
        POLICY_LOSSES.resolve(config.algorithm.policy_loss, config.algorithm.policy_loss_args)
    check_engine(config, _platform_of(config))
    tokenizer, data, kind = load_tokenizer(config.model.path), config.data, config.rollout.episode
    for section in stops_of(config):
        check_stops_of(tokenizer, *section)
    with ExitStack() as opened:
        media = open_media(data, config.model.path, tokenizer, config.run_folder)
        episodes = None
        if kind.kind != "single":
            episodes = open_episodes(kind, data, tokenizer, config.rollout.max_new_tokens, media.model)
            opened.callback(episodes.close)
        tools = episodes.tool_schemas if episodes is not None else ()
        builder = PromptBuilder(tokenizer, data, tools, media)
        held_out = builder.build(rows_of(data.eval), prefix="eval") if data.eval is not None else []
        parts = build_parts(builder, data.train, prefix="train") if train else []
        evaluations = [_evaluation_set(config, evaluation, builder) for evaluation in config.evaluations]
        all_held_out = [*held_out, *(prompt for evaluation in evaluations for prompt in evaluation.prompts)]
        kept = [drop_eval_overlap(prompts, all_held_out) for prompts in parts]
        rewards = build_rewards(config.rewards, data, config.rollout.deadlines.reward_s)
        rewards.check([*(prompt for part in kept for prompt in part), *held_out])
        if not is_restart():  # they judged before, and a server that is lost may be a while in coming back
            is_single = kind.kind == "single"
            try_sources(rewards, [*(prompt for part in kept for prompt in part), *held_out], functions=is_single)
            for evaluation in evaluations:
                if evaluation.settings.rewards is not None:
                    try_sources(evaluation.rewards, evaluation.prompts, functions=is_single)
        rewards.tolerate(config.rewards)
        parts_of_step = open_parts(config, tokenizer) if train else []
        for part in parts_of_step:
            part.check(tokenizer, (prompt for prompts in kept for prompt in prompts))
        opened.pop_all()
    rows = sum(map(len, parts))
    layers = _dense_layers(config)
    return RlInputs(tokenizer, episodes, kept, held_out, evaluations, rows, builder.dropped, rewards, parts_of_step, layers)


def _dense_layers(config: Config) -> int | None:
    """Layers of the policy, where it has no experts and a CPU computes it."""
    try:
        hf_config = load_hf_config(config.model.path)
        weight_map = architecture_for(hf_config).weight_map(hf_config)
    except ModelError:  # said when the policy is built
        return None
    return weight_map.num_layers if _platform_of(config) == "cpu" and not weight_map.num_experts else None


def _evaluation_set(config: Config, one: EvaluationConfig, builder: PromptBuilder) -> EvaluationSet:
    keys = {"prompt_key": one.prompt_key, "answer_key": one.answer_key}
    set_keys = {key: value for key, value in keys.items() if value is not None}
    template = {"prompt": one.prompt} if one.prompt_key is not None else {}
    data = config.data.model_copy(update={"eval": one.rows, **set_keys, **template})
    index = config.evaluations.index(one)
    prompts = builder.of_rows_like(data).build(
        rows_of(one.rows), prefix="eval", origin=Origin(f"evaluations[{index}].rows", one.rows)
    )
    configs = config.rewards if one.rewards is None else one.rewards
    rewards = build_rewards(configs, data, config.rollout.deadlines.reward_s)
    rewards.check(prompts)
    rewards.tolerate(configs)
    return EvaluationSet(one, prompts, rewards)


def _platform_of(config: Config) -> str:
    """This machine's, where the run starts a Ray of its own; what a cluster's nodes lack is said once the run has joined it."""
    is_local = config.resources.ray_address is None and "RAY_ADDRESS" not in os.environ
    return platform.detect().name if is_local else "cuda"
