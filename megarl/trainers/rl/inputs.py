"""The user's inputs for reinforcement learning, read whole before anything is started: training, eval and generate read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megarl import platform
from megarl.algorithms import ADVANTAGES, POLICY_LOSSES
from megarl.config import Config
from megarl.config.evaluations import EvaluationConfig
from megarl.data.mixture import build_parts
from megarl.data.prompts import rows_of
from megarl.data.rows import Origin
from megarl.data.sample import Prompt, Sample
from megarl.data.sampler import drop_eval_overlap
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.options.pictures.picture_reader import open_pictures
from megarl.rewards import build_rewards
from megarl.rewards.sources import RewardSources
from megarl.rollout.engines.registry import check_engine
from megarl.rollout.episodes import Episodes, open_episodes
from megarl.supervise.child_run import is_restart
from megarl.trainers.rl.eval_figures import set_figures
from megarl.trainers.rl.step_parts import StepPart, open_parts
from megarl.trainers.run.start import check_architectures


@dataclass(frozen=True)
class EvaluationSet:
    """A named set as it is asked and judged."""

    settings: EvaluationConfig
    prompts: list[Prompt]
    rewards: RewardSources


@dataclass(frozen=True)
class RlInputs:
    """The tokenizer, the prompts and what judges responses to them; `close` when the run ends."""

    tokenizer: Any
    episodes: Episodes | None
    """None where every response is a single turn."""
    train: list[list[Prompt]]
    """By part of the mixture, without those that are held out."""
    held_out: list[Prompt]
    """Those of `data.eval`."""
    evaluations: list[EvaluationSet]
    train_rows: int
    """Rows of all parts before those were left out that are in `data.eval` or `evaluations`, too."""
    dropped: dict[str, int]
    """Rows, of all sets, that were left out because they do not fit, by the reason."""
    rewards: RewardSources
    parts: list[StepPart]
    """Those that options take in a training step."""

    @property
    def overlap(self) -> int:
        """Training rows that were left out because they are held out."""
        return self.train_rows - sum(map(len, self.train))

    def measure_sets(self, sample: Callable[[Sequence[Prompt], EvaluationConfig], list[Sample]]) -> dict[str, float]:
        """The figures of every set of `evaluations` (`set_figures`), as `NAME/figure`; `sample` answers prompts."""
        figures: dict[str, float] = {}
        for one in self.evaluations:
            samples = sample(one.prompts, one.settings)
            found = set_figures(
                samples,
                one.rewards.score(samples),
                samples_per_prompt=one.settings.samples_per_prompt,
                source_key=one.settings.source_key,
                final_answer=one.rewards.final_answer,
            )
            figures |= {f"{one.settings.name}/{name}": value for name, value in found.items()}
        return figures

    def close(self) -> None:
        """End what episodes started, such as the processes of tools."""
        if self.episodes is not None:
            self.episodes.close()


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
    with ExitStack() as opened:
        pictures = open_pictures(data, config.model.path, tokenizer, config.run_folder)
        episodes = None
        if kind.kind != "single":
            episodes = open_episodes(kind, data, tokenizer, config.rollout.max_new_tokens, pictures.model)
            opened.callback(episodes.close)
        tools = episodes.tool_schemas if episodes is not None else ()
        builder = PromptBuilder(tokenizer, data, tools, pictures)
        held_out = builder.build(rows_of(data.eval), prefix="eval") if data.eval is not None else []
        parts = build_parts(builder, data.train, prefix="train") if train else []
        evaluations = [_evaluation_set(config, one, builder) for one in config.evaluations]
        all_held_out = [*held_out, *(prompt for one in evaluations for prompt in one.prompts)]
        kept = [drop_eval_overlap(prompts, all_held_out) for prompts in parts]
        rewards = build_rewards(config.rewards, data)
        rewards.check([*(prompt for part in kept for prompt in part), *held_out])
        if not is_restart():  # they judged before, and a server that is lost may be a while in coming back
            is_single = kind.kind == "single"
            rewards.try_sources([*(prompt for part in kept for prompt in part[:1]), *held_out[:1]], functions=is_single)
            for one in evaluations:
                if one.settings.rewards is not None:
                    one.rewards.try_sources(one.prompts, functions=is_single)
        parts_of_step = open_parts(config, tokenizer) if train else []
        for part in parts_of_step:
            part.check(tokenizer, (prompt for prompts in kept for prompt in prompts))
        opened.pop_all()
    rows = sum(map(len, parts))
    return RlInputs(tokenizer, episodes, kept, held_out, evaluations, rows, builder.dropped, rewards, parts_of_step)


def _evaluation_set(config: Config, one: EvaluationConfig, builder: PromptBuilder) -> EvaluationSet:
    keys = {"prompt_key": one.prompt_key, "answer_key": one.answer_key}
    data = config.data.model_copy(update={"eval": one.rows} | {key: value for key, value in keys.items() if value is not None})
    place = config.evaluations.index(one)
    prompts = builder.of_rows_like(data).build(
        rows_of(one.rows), prefix="eval", origin=Origin(f"evaluations[{place}].rows", one.rows)
    )
    rewards = build_rewards(config.rewards if one.rewards is None else one.rewards, data)
    rewards.check(prompts)
    return EvaluationSet(one, prompts, rewards)


def _platform_of(config: Config) -> str:
    """This machine's, where the run starts a Ray of its own; what a cluster's nodes lack is said once the run has joined it."""
    is_local = config.resources.ray_address is None and "RAY_ADDRESS" not in os.environ
    return platform.detect().name if is_local else "cuda"
