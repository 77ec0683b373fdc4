"""Further prompts in place of groups that teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection

from megarl.config import Config
from megarl.data.sample import Sample
from megarl.experience.experience import group_rewards, is_tied
from megarl.experience.failed_groups import without_groups

ScoredSamples = tuple[list[Sample], list[float]]
"""Samples, and the reward of each."""


def refilled(
    config: Config, samples: list[Sample], rewards: list[float], dropped: Collection[str], more: Callable[[int], ScoredSamples]
) -> tuple[list[Sample], list[float], dict[str, float]]:
    """DAPO's dynamic sampling: groups whose rewards all agree teach nothing, so further prompts take their place.

    After `rollout.dynamic_sampling_rounds` rounds, uniform groups fill the places that are left: a step is full, but for the
    groups `dropped`, which may become more, with any number of rounds. `more` samples and scores so many groups. Returns the
    step's samples and rewards, and metrics.
    """
    required, rounds = config.rollout.prompts_per_step, config.rollout.dynamic_sampling_rounds
    groups, needed = group_rewards(samples, rewards), config.algorithm.estimator_needs

    def teaches(group: list[tuple[Sample, float]]) -> bool:
        return group[0][0].group_id not in dropped and not is_tied(group, needed)

    spent = 0
    while spent < rounds and (missing := required - sum(map(teaches, groups))) > 0:
        groups += group_rewards(*more(missing))
        spent += 1
    kept = without_groups(config, groups, dropped) if dropped else groups
    chosen = sorted(kept, key=lambda group: is_tied(group, needed))[:required] if rounds else kept
    figures: dict[str, float] = {}
    if rounds:
        figures |= {"rollout/dynamic_sampling_rounds": spent, "rollout/discarded_groups": len(groups) - len(chosen)}
    pairs = [pair for group in chosen for pair in group]
    return [sample for sample, _ in pairs], [reward for _, reward in pairs], figures
