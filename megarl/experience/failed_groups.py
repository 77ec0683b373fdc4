"""Prompt groups that a step is computed without: a source of reward failed on a response to them (`on_error: drop_group`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megarl.config import Config
from megarl.data.sample import Sample
from megarl.errors import RewardError


def without_groups(
    config: Config, groups: Sequence[list[tuple[Sample, float]]], dropped: Collection[str]
) -> list[list[tuple[Sample, float]]]:
    """Leave out the groups whose ids are `dropped`, because a source of reward failed on a response to them.

    Raises:
        RewardError: those that are left are too few for the mini-batches and the data-parallel ranks.
    """
    left = [group for group in groups if group[0][0].group_id not in dropped]
    responses = len({sample.episode_id for group in left for sample, _ in group})
    shared, of_what = (len(left), "groups") if config.algorithm.loss_needs.pairs else (responses, "responses")
    needed = max(
        role.layout.dp * (config.algorithm.mini_batches if role.trained is not None else 1)
        for role in config.roles
        if role.layout is not None
    )
    if len(left) < len(groups) and shared < needed:
        raise RewardError(
            f"{len(groups) - len(left)} of {len(groups)} prompt groups of a step were left out, as rewards failed on them "
            f"(rewards[].on_error is 'drop_group'), and a step needs at least {needed} {of_what}; mend the reward, then go on "
            "with run.resume=auto"
        )
    return left
