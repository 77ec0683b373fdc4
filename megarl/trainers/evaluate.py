"""`megarl eval`: answer the held-out prompts greedily with a model or a checkpoint of a run, and score the answers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

from megarl.checkpoint.run_checkpoint import CheckpointFolder
from megarl.config import Config
from megarl.data.prompts import load_rows
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import ConfigError
from megarl.rewards import build_rewards
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
    check_architectures(config)
    folder = CheckpointFolder(config.run_folder).resolve(checkpoint) if checkpoint is not None else None
    tokenizer = load_tokenizer(config.model.path)
    prompts = PromptBuilder(tokenizer, config.data).build(load_rows(config.data.eval), prefix="eval")
    rewards = build_rewards(config.rewards, config.data)
    rewards.check(prompts)
    requests = group_requests(config)[:1] if folder is not None else []
    with tempfile.TemporaryDirectory(prefix="megarl-eval-") as logs, open_cluster(config, requests, logs) as cluster:
        rollouts = Rollouts(config, cluster, tokenizer)
        starting = rollouts.begin_start()
        if folder is not None:
            roles = open_roles(config, cluster)
            roles.load(POLICY)
            roles.restore(str(folder.resolve()), [POLICY])
        rollouts.finish_start(starting)
        if folder is not None:
            rollouts.update_weights(roles)
        started = time.perf_counter()
        samples = rollouts.generate(prompts, greedy=True)
        scores = rewards.score(samples)
        return evaluation(scores, config) | {"seconds": time.perf_counter() - started}


def evaluation(scores: Sequence[float], config: Config) -> dict[str, float]:
    """`reward` (mean) and `accuracy`: the share of responses that got all the reward there is."""
    full = sum(reward.weight for reward in config.rewards if reward.weight > 0)
    correct = sum(score >= full - 1e-9 for score in scores)
    return {"reward": sum(scores) / len(scores), "accuracy": correct / len(scores), "prompts": float(len(scores))}
