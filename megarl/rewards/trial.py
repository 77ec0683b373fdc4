"""Sources of reward that are tried before a run, on made-up responses: mistakes of others' programs are told early."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megarl.data.rows import find_value
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.asking import verdicts_within
from megarl.rewards.builtin.http import HttpReward
from megarl.rewards.sources import SCORED_S, RewardSources
from megarl.rewards.user_reward import UserReward

FORMS_TRIED = 8
"""Sets of keys of rows, such as rows with and without `answer`, that a function of the user is tried with."""
TRIED_S = 60.0
"""For a function of the user that is tried before a run."""


def try_sources(sources: RewardSources, prompts: Sequence[Prompt], *, functions: bool = True) -> None:
    """Have others' programs judge made-up responses to the first of `prompts`, so that a mistake is told early.

    The user's own functions judge two to the first prompt of each set of keys that rows have, unless `functions` is false:
    they may read turns, which a made-up response lacks.
    Servers of `http` judge one; judges (`llm_judge`) are not asked, as their answers may cost money.

    Raises:
        RewardError: one of them raised, answered what is no reward, or could not be asked.
    """
    for label, _, scorer in sources.sources:
        if isinstance(scorer, UserReward) and functions:
            key, count, deadline_s = scorer.keys.answer, 2, TRIED_S
        elif isinstance(scorer, HttpReward):
            key, count, deadline_s = scorer.answer_key, 1, SCORED_S
        else:
            continue
        for prompt in _one_of_each(prompts) if isinstance(scorer, UserReward) else prompts[:1]:
            samples = [made_up_sample(prompt, _gold_text(prompt, key), number) for number in range(count)]
            try:
                verdicts_within(scorer, samples, time.monotonic() + deadline_s, label, deadline_s)
            except RewardError as error:
                of = "made-up responses" if count > 1 else "a made-up response"
                raise RewardError(f"{error}; asked before the run about {of} to row {prompt.row_id}") from None


def made_up_sample(prompt: Prompt, text: str, number: int = 0) -> Sample:
    """The response `text` to `prompt` as an engine might have given it, for functions that are tried without a model."""
    group = prompt.group_id or prompt.row_id  # groups are named when they are drawn
    ids = (f"{group}/{number}", group, prompt.row_id)
    return Sample(
        *ids, list(prompt.prompt_ids), [0], [1], [0.0], [0], "stop",
        prompt_text=prompt.prompt_text, response_text=text, row=dict(prompt.row),
    )  # fmt: skip


def _one_of_each(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of each set of keys that rows have, of the first `FORMS_TRIED` sets."""
    firsts = {frozenset(prompt.row): prompt for prompt in reversed(prompts)}
    return sorted(firsts.values(), key=prompts.index)[:FORMS_TRIED]


def _gold_text(prompt: Prompt, key: str) -> str:
    gold = find_value(prompt.row, key)
    return str(gold) if isinstance(gold, str | int | float) else "0"
