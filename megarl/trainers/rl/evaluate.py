"""`megarl eval`: answer the held-out prompts greedily with a model or a checkpoint of a run, and score the answers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack

from megarl.checkpoint.run_checkpoint import CheckpointFolder
from megarl.config import Config
from megarl.data.sample import Sample
from megarl.errors import ConfigError
from megarl.trainers.rl.inputs import read_inputs
from megarl.trainers.rl.rollouts import Rollouts
from megarl.trainers.run.roles import POLICY, group_requests
from megarl.trainers.run.start import open_cluster, open_roles


def evaluate(config: Config, checkpoint: str | None) -> dict[str, float]:
    """Evaluate `model.path`, or the policy saved in `checkpoint`, on `data.eval`.

    Returns the figures of `evaluation` and the seconds that generating and scoring took. Writes nothing.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    if config.data.eval is None:
        raise ConfigError("data.eval is null, but eval needs rows to measure on")
    started = time.perf_counter()
    samples, scores = answer(config, checkpoint, held_out=True)
    return evaluation(samples, scores) | {"seconds": time.perf_counter() - started}


def answer(config: Config, checkpoint: str | None, *, held_out: bool) -> tuple[list[Sample], list[float]]:
    """Responses of `model.path`, or of the policy saved in `checkpoint`, and their rewards. A reward model is not asked.

    `held_out`: one greedy response to every row of `data.eval`; else `rollout.samples_per_prompt` sampled ones to every row
    of `data.train` that is not held out.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    if not config.rewards:
        raise ConfigError("an evaluation needs a source of reward: set rewards (a source may have weight 0)")
    if checkpoint is None and (field := config.rollout.other_weights) is not None:
        raise ConfigError.needs(
            field, "a checkpoint whose weights the engines get first", f"name one with --checkpoint, or remove {field}"
        )
    folder = CheckpointFolder(config.run_folder).resolve(checkpoint) if checkpoint is not None else None
    inputs = read_inputs(config, train=not held_out)
    prompts = inputs.held_out if held_out else [prompt for part in inputs.train for prompt in part]
    with ExitStack() as stack:
        stack.callback(inputs.close)
        requests = group_requests(config)[:1] if folder is not None else []
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-logs-"))
        cluster = stack.enter_context(open_cluster(config, requests, logs))
        rollouts = Rollouts(config, cluster, inputs.tokenizer, inputs.episodes)
        stack.callback(rollouts.close)
        starting, roles = rollouts.begin_start(), None
        if folder is not None:
            roles = open_roles(config, cluster.start_groups(config.run.seed))
            roles.load(POLICY)
            roles.restore(str(folder.resolve()), [POLICY])
        rollouts.finish_start(starting, roles)
        if folder is not None:
            rollouts.update_weights()
        samples = rollouts.generate(prompts, greedy=held_out)
        return samples, inputs.rewards.score(samples)


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
