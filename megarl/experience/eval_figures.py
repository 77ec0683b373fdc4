"""Figures of an evaluation: reward and accuracy, or avg@k, pass@j and maj@k with standard errors.

A figure is the mean over prompts, so its standard error is that of prompts: the responses to one prompt are no independent
tries (Miller 2024, "Adding Error Bars to Evals", section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from megarl.data.rows import find_value
from megarl.data.sample import Sample


def evaluation(samples: Sequence[Sample], scores: Sequence[float]) -> dict[str, float]:
    """`reward` (mean), and `accuracy`: the share of responses that every function in `rewards` gave 1 or more.

    A source of weight 0 takes part in the accuracy alone. There is no accuracy where only a reward model judges.
    """
    figures: dict[str, float] = {"reward": sum(scores) / len(scores), "prompts": len(scores)}
    judged = [is_right(sample) for sample in samples]
    if None not in judged:
        figures["accuracy"] = sum(map(bool, judged)) / len(judged)
    return figures


def is_right(sample: Sample) -> bool | None:
    """Return whether every function gave the response 1 or more; None if none was asked."""
    verdicts = [value >= 1 - 1e-9 for name, value in sample.rewards.items() if name != "reward_model"]
    return all(verdicts) if verdicts else None


def pass_rates(samples: Sequence[Sample]) -> dict[str, float]:
    """By group id, the share of its responses that are right (`is_right`); each of `samples` was judged."""
    right: dict[str, list[bool]] = {}
    for sample in samples:
        right.setdefault(sample.group_id, []).append(bool(is_right(sample)))
    return {group: sum(judged) / len(judged) for group, judged in right.items()}


def accuracy_figures(groups: Sequence[Sequence[bool]], answers: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """Figures of the responses to each prompt, k to every one.

    Args:
        groups: `[P][k]`, whether a response is right.
        answers: `[P][k]`, what it answers; None: nothing.

    Returns:
        `avg@k`, the share of right responses; `pass@j` for j = 2, 4, ... and k, the chance that one of j responses is right;
        `maj@k`, the share of prompts whose most frequent answer is right (ties count in parts). Each has a `..._se` beside
        it where there are two prompts or more.
    """
    k = len(groups[0])
    of_prompts: dict[str, list[float]] = {f"avg@{k}": [sum(group) / k for group in groups]}
    if k > 1:
        for j in sorted({2**power for power in range(1, k.bit_length())} | {k}):
            of_prompts[f"pass@{j}"] = [pass_at(j, sum(group), k) for group in groups]
        of_prompts[f"maj@{k}"] = [majority(group, group_answers) for group, group_answers in zip(groups, answers, strict=True)]
    figures = {}
    for name, values in of_prompts.items():
        figures[name] = mean = sum(values) / len(values)
        if len(values) > 1:
            variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
            figures[f"{name}_se"] = math.sqrt(variance / len(values))
    return figures


def pass_at(j: int, right: int, k: int) -> float:
    """The chance that one of `j` responses, drawn without replacement from `k` of which `right` are right, is right.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return 1.0 - math.comb(k - right, j) / math.comb(k, j)


def majority(right: Sequence[bool], answers: Sequence[str | None]) -> float:
    """1 if the most frequent answer is right, 0 if it is wrong; where several are as frequent, the share of right ones.

    Right responses agree, whatever their spelling: the functions that judge found them equal to the gold answer. Responses
    without an answer do not vote (Wang et al. 2022, arXiv:2203.11171).
    """
    votes: dict[tuple[bool, str], int] = {}
    for is_so, answer in zip(right, answers, strict=True):
        if is_so or answer is not None:
            vote = (is_so, "" if is_so else str(answer))
            votes[vote] = votes.get(vote, 0) + 1
    first = [is_so for (is_so, _), count in votes.items() if count == max(votes.values())]
    return sum(first) / len(first) if first else 0.0


def set_figures(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    *,
    samples_per_prompt: int,
    source_key: str | None,
    final_answer: Callable[[str], str | None],
) -> dict[str, float]:
    """All figures of an evaluation set; `samples` are those of each prompt in turn, scored.

    Besides `accuracy_figures`: `reward` and `tokens_mean` (means over responses), `truncated` (share), `prompts` (number).
    With `source_key`, `accuracy_figures` of each value that rows have under it, as `SOURCE/avg@k` and so on.
    """
    k = samples_per_prompt
    groups = [samples[start : start + k] for start in range(0, len(samples), k)]
    right = [[bool(is_right(sample)) for sample in group] for group in groups]
    answers = [[final_answer(sample.response_text) for sample in group] for group in groups]
    figures = accuracy_figures(right, answers)
    for source, places in _by_source(groups, source_key).items():
        part = accuracy_figures([right[index] for index in places], [answers[index] for index in places])
        figures |= {f"{source}/{name}": value for name, value in part.items()}
    return figures | {
        "reward": sum(rewards) / len(rewards),
        "tokens_mean": sum(sample.response_length for sample in samples) / len(samples),
        "truncated": sum(sample.truncated for sample in samples) / len(samples),
        "prompts": len(groups),
    }


def _by_source(groups: Sequence[Sequence[Sample]], key: str | None) -> Mapping[str, list[int]]:
    indices_by_source: dict[str, list[int]] = {}
    if key is not None:
        for index, group in enumerate(groups):
            indices_by_source.setdefault(str(find_value(group[0].row, key)), []).append(index)
    return indices_by_source
