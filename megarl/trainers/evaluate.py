"""`megarl eval`: answer the held-out prompts greedily with a model or a checkpoint of a run, and score the answers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack

from megarl.checkpoint.run_checkpoint import CheckpointFolder
from megarl.config import Config
from megarl.config.schema import SourceConfig
from megarl.data.mixture import build_parts
from megarl.data.sample import Sample
from megarl.data.sampler import without_held_out
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import ConfigError
from megarl.rewards import build_rewards
from megarl.rollout.engine_args import check_engine_args
from megarl.rollout.episodes import open_episodes
from megarl.trainers.processes import check_architectures, open_cluster, open_roles
from megarl.trainers.roles import POLICY, group_requests
from megarl.trainers.rollouts import Rollouts


def evaluate(config: Config, checkpoint: str | None) -> dict[str, float]:
    """Evaluate `model.path`, or the policy saved in `checkpoint`, on `data.eval`.

    Returns the figures of `evaluation` and the seconds that generating and scoring took. Writes nothing.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    if config.data.eval is None:
        raise ConfigError("data.eval is null, but eval needs rows to measure on")
    started = time.perf_counter()
    samples, scores = answer(config, config.data.eval, "eval", checkpoint, greedy=True)
    return evaluation(samples, scores) | {"seconds": time.perf_counter() - started}


def answer(
    config: Config, source: SourceConfig, prefix: str, checkpoint: str | None, *, greedy: bool
) -> tuple[list[Sample], list[float]]:
    """Responses of `model.path`, or of the policy saved in `checkpoint`, to every row of `source`, and their rewards.

    `greedy`: one response per row, else `rollout.samples_per_prompt`. A reward model is not asked. Rows of `data.eval` are
    left out of any other source.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    if not config.rewards:
        raise ConfigError("rewards is empty, but responses are judged by its sources; it may have one of weight 0")
    check_architectures(config)
    check_engine_args(config.rollout.engine_args)
    if checkpoint is None and (name := config.rollout.other_weights) is not None:
        raise ConfigError(
            f"rollout.engine_args has {name}, by which engines have other weights until they are sent some; leave it out, "
            "or name a checkpoint whose weights they are to be sent"
        )
    folder = CheckpointFolder(config.run_folder).resolve(checkpoint) if checkpoint is not None else None
    tokenizer = load_tokenizer(config.model.path)
    with ExitStack() as stack:
        episode = None
        if config.rollout.episode.kind != "single":
            episode = open_episodes(config.rollout.episode, config.data, tokenizer, config.rollout.max_new_tokens)
            stack.callback(episode[1].close)
        builder = PromptBuilder(tokenizer, config.data, episode[1].tool_schemas if episode is not None else ())
        prompts = [p for part in build_parts(builder, source, prefix=prefix) for p in part]
        if config.data.eval is not None and source is not config.data.eval:
            held_out = build_parts(builder, config.data.eval, prefix="eval")
            prompts = without_held_out(prompts, [prompt for part in held_out for prompt in part])
        rewards = build_rewards(config.rewards, config.data)
        rewards.check(prompts)
        requests = group_requests(config)[:1] if folder is not None else []
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-logs-"))
        cluster = stack.enter_context(open_cluster(config, requests, logs))
        rollouts = Rollouts(config, cluster, tokenizer, episode)
        stack.callback(rollouts.close)
        starting, roles = rollouts.begin_start(), None
        if folder is not None:
            roles = open_roles(config, cluster)
            roles.load(POLICY)
            roles.restore(str(folder.resolve()), [POLICY])
        rollouts.finish_start(starting, roles)
        if folder is not None:
            rollouts.update_weights()
        samples = rollouts.generate(prompts, greedy=greedy)
        return samples, rewards.score(samples)


def evaluation(samples: Sequence[Sample], scores: Sequence[float]) -> dict[str, float]:
    """`reward` (mean), and `accuracy`: the share of responses that every function in `rewards` gave 1 or more.

    A source of weight 0 takes part in the accuracy alone. There is no accuracy where only a reward model judges.
    """
    figures = {"reward": sum(scores) / len(scores), "prompts": float(len(scores))}
    judged = [is_right(sample) for sample in samples]
    if None not in judged:
        figures["accuracy"] = sum(map(bool, judged)) / len(judged)
    return figures


def is_right(sample: Sample) -> bool | None:
    """Whether every function gave the response 1 or more; None if none was asked."""
    verdicts = [value >= 1 - 1e-9 for name, value in sample.rewards.items() if name != "reward_model"]
    return all(verdicts) if verdicts else None
