"""Runs whose advantages credit turns, tokens, subsets or several rewards: those of their samples, computed here once more.

The samples are read from `samples.jsonl` with what rewards and environment gave them; formulas are written out in plain Python.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config import Config
from megarl.data.sample import Prompt
from megarl.trainers.rl.train import train
from tests.themes.e2e.test_episodes_run import config as config

pytestmark = pytest.mark.usefixtures("local_ray")
Sample = dict[str, Any]
GAMMA, EPS, STEP_WEIGHT = 0.9, 1e-6, 0.5


class Rooms:
    """At most three turns, from room to room: the next one depends on the length of what was said, as does the reward."""

    def __init__(self) -> None:
        self.turns, self.room = 0, 0

    def reset(self, prompt: Prompt) -> str:
        return f"you are in {self.room}"

    def state_key(self) -> list[int]:
        return [self.turns, self.room]

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turns += 1
        self.room = len(text) % 2
        return f"you are in {self.room}", len(text) / 10, self.turns == 3


def samples_of(config: Config) -> list[Sample]:
    return [json.loads(line) for line in (Path(config.run_folder) / "samples.jsonl").read_text().splitlines()]


def groups_of(samples: list[Sample]) -> list[list[Sample]]:
    groups: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample["step"], sample["group_id"]), []).append(sample)
    return list(groups.values())


def standardised(values: list[float], *, spread: Callable[[list[float]], float] = statistics.stdev) -> list[float]:
    if len({*values}) == 1:
        return [0.0] * len(values)
    return [(value - statistics.fmean(values)) / (spread(values) + EPS) for value in values]


def check(sample: Sample, of_sampled: list[float]) -> None:
    """One number for each token that the policy sampled, 0 at those that it was told."""
    given = iter(of_sampled)
    want = [next(given) if sampled else 0.0 for sampled in sample["sampled_mask"]]
    assert sample["training"]["advantages"] == pytest.approx(want, rel=1e-4, abs=1e-5)


def tokens_of_turns(sample: Sample) -> list[int]:
    return [len([*run]) for sampled, run in itertools.groupby(sample["sampled_mask"]) if sampled]


def test_a_run_in_rooms_credits_turns_with_what_they_and_later_ones_earned(config: Config) -> None:
    algorithm = config.algorithm.model_copy(
        update={
            "advantage": "gigpo", "gamma": GAMMA, "advantage_normalisation": "none",
            "advantage_args": {"step_weight": STEP_WEIGHT},
        }
    )  # fmt: skip
    episode = config.rollout.episode.model_copy(update={"tools": (f"{__name__}:Rooms",)})
    rollout = config.rollout.model_copy(update={"episode": episode})
    config = config.model_copy(update={"algorithm": algorithm, "rollout": rollout})
    train(config)
    met = 0
    for group in groups_of(samples_of(config)):
        visits: dict[str, list[float]] = {}
        returns: list[list[float]] = []
        for sample in group:
            rewards = sample["turn_rewards"] or [0.0] * len(tokens_of_turns(sample))
            assert len(rewards) == len(sample["turn_states"]) == len(tokens_of_turns(sample))
            assert sum(rewards) == pytest.approx(sample["training"]["reward"])
            turns = range(len(rewards))
            returns.append([sum(GAMMA ** (v - u) * rewards[v] for v in turns if v >= u) for u in turns])
            for state, value in zip(sample["turn_states"], returns[-1], strict=True):
                visits.setdefault(state, []).append(value)
        episodes = standardised([sample["training"]["reward"] for sample in group])
        for sample, of_turns, episode_advantage in zip(group, returns, episodes, strict=True):
            steps = [
                dict(zip(visits[state], standardised(visits[state]), strict=True))[value]
                for state, value in zip(sample["turn_states"], of_turns, strict=True)
            ]
            want = zip(steps, tokens_of_turns(sample), strict=True)
            check(sample, [episode_advantage + STEP_WEIGHT * step for step, tokens in want for _ in range(tokens)])
        assert len(visits["[0, 0]"]) == len(group)
        met += sum(len(values) > 1 for state, values in visits.items() if state != "[0, 0]")
    assert met > 0


def test_a_run_subtracts_the_optimal_baseline_of_every_token(tiny_config: Callable[..., Config], tiny_model: Path) -> None:
    """The first step's, with distributions by Hugging Face's model of the run's first weights."""
    config = tiny_config(**{"algorithm.advantage": "optimal_token_baseline", "run.steps": 1, "rollout.temperature": 0.8})
    train(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    spread = 0.0
    for group in groups_of(samples_of(config)):
        energies = []
        for sample in group:
            prompt, response = sample["prompt_ids"], sample["response_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double() / 0.8
            p = logits.softmax(-1)
            energies.append(
                (1 - 2 * p.gather(1, torch.tensor(response)[:, None])[:, 0] + p.square().sum(-1)).cumsum(0).tolist()
            )
        for sample in group:
            want = []
            for t in range(len(sample["response_ids"])):
                with_token = [(other, own) for other, own in zip(group, energies, strict=True) if len(own) > t]
                total = sum(own[t] for _, own in with_token)
                baseline = sum(own[t] * other["training"]["reward"] for other, own in with_token) / total
                want.append(sample["training"]["reward"] - baseline)
            check(sample, want)
            spread = max(spread, max(want) - min(want))
    assert spread > 1e-3


def test_a_run_normalises_every_reward_by_itself(tiny_config: Callable[..., Config]) -> None:
    digits = tiny_config().rewards[0].name
    rewards = [{"name": digits}, {"name": "format_regex", "weight": 0.5, "args": {"pattern": "[0-4]"}}]
    config = tiny_config(**{"algorithm.advantage": "gdpo", "run.steps": 1, "rewards": rewards})
    train(config)
    samples, sums = samples_of(config), {}
    for group in groups_of(samples):
        weighted = [
            [weight * value for value in standardised([sample["rewards"][name] for sample in group])]
            for name, weight in ((digits, 1.0), ("format_regex", 0.5))
        ]
        sums |= {sample["sample_id"]: sum(parts) for sample, *parts in zip(group, *weighted, strict=True)}
    assert len({*sums.values()}) > 3
    of_all = dict(zip(sums, standardised([*sums.values()]), strict=True))
    for sample in samples:
        check(sample, [of_all[sample["sample_id"]]] * len(sample["response_ids"]))


def test_a_run_trains_for_the_best_of_k(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config(**{"algorithm.advantage": "pass_at_k", "algorithm.advantage_args": {"k": 2}, "run.steps": 1})
    train(config)
    for group in groups_of(samples_of(config)):
        rewards = [sample["training"]["reward"] for sample in group]
        pairs = {pair: max(rewards[i] for i in pair) for pair in itertools.combinations(range(len(group)), 2)}
        mean, sigma = statistics.fmean(pairs.values()), statistics.pstdev(pairs.values())
        for place, sample in enumerate(group):
            own = statistics.fmean(best for pair, best in pairs.items() if place in pair)
            value = (own - mean) / (sigma + EPS) if sigma > 0 else 0.0
            check(sample, [value] * len(sample["response_ids"]))
