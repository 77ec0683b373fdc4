"""What the user gave for reinforcement learning, read whole before anything is started: training, eval and generate read it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megarl import platform
from megarl.algorithms import ADVANTAGES, POLICY_LOSSES
from megarl.config import Config
from megarl.data.mixture import build_parts
from megarl.data.picture_reader import open_pictures
from megarl.data.prompts import rows_of
from megarl.data.sample import Prompt
from megarl.data.sampler import drop_eval_overlap
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import ConfigError
from megarl.rewards import build_rewards
from megarl.rewards.sources import RewardSources
from megarl.rollout.engines.registry import check_engine
from megarl.rollout.episodes import Episodes, open_episodes
from megarl.trainers.run.start import check_architectures


@dataclass(frozen=True)
class RlInputs:
    """The tokenizer, the prompts and what judges responses to them; `close` when the run ends."""

    tokenizer: Any
    episodes: Episodes | None
    """None where every response is a single turn."""
    train: list[list[Prompt]]
    """By part of the mixture, without those that are held out."""
    held_out: list[Prompt]
    train_rows: int
    """Rows of all parts before those were left out that are held out, too."""
    dropped: dict[str, int]
    """Rows, of both, that were left out because they do not fit, by the reason."""
    rewards: RewardSources

    @property
    def overlap(self) -> int:
        """Training rows that were left out because they are held out."""
        return self.train_rows - sum(map(len, self.train))

    def close(self) -> None:
        """End what episodes started, such as the processes of tools."""
        if self.episodes is not None:
            self.episodes.close()


def read_inputs(config: Config, *, train: bool = True) -> RlInputs:
    """Tokenizer, rows, prompts and rewards of `config`, each looked at whole; without `train` those of `data.eval` alone.

    Raises:
        MegarlError: whatever is wrong with them or with the classes and functions that the config names, as one sentence.
    """
    check_architectures(config)
    ADVANTAGES.resolve(config.algorithm.advantage, config.algorithm.advantage_args)
    POLICY_LOSSES.resolve(config.algorithm.policy_loss, config.algorithm.policy_loss_args)
    check_engine(config, _platform_of(config))
    tokenizer, data, kind = load_tokenizer(config.model.path), config.data, config.rollout.episode
    if config.needs_teacher and load_tokenizer(config.teacher.path or config.model.path).get_vocab() != tokenizer.get_vocab():
        reason = "has another vocabulary than model.path, so that its log-probs are of other tokens"
        raise ConfigError.of("teacher.path", config.teacher.path, reason, allowed="a model with the policy's tokenizer")
    with ExitStack() as opened:
        episodes = None
        if kind.kind != "single":
            episodes = open_episodes(kind, data, tokenizer, config.rollout.max_new_tokens)
            opened.callback(episodes.close)
        tools = episodes.tool_schemas if episodes is not None else ()
        pictures = open_pictures(data, config.model.path, tokenizer, config.run_folder)
        builder = PromptBuilder(tokenizer, data, tools, pictures)
        held_out = builder.build(rows_of(data.eval), prefix="eval") if data.eval is not None else []
        parts = build_parts(builder, data.train, prefix="train") if train else []
        kept = [drop_eval_overlap(prompts, held_out) for prompts in parts]
        rewards = build_rewards(config.rewards, data)
        rewards.check([*(prompt for part in kept for prompt in part), *held_out])
        opened.pop_all()
    return RlInputs(tokenizer, episodes, kept, held_out, sum(map(len, parts)), builder.dropped, rewards)


def _platform_of(config: Config) -> str:
    """This machine's, where the run starts a Ray of its own; what a cluster's nodes lack is said once the run has joined it."""
    is_local = config.resources.ray_address is None and "RAY_ADDRESS" not in os.environ
    return platform.detect().name if is_local else "cuda"
