"""Batch arithmetic against brute force: what it derives is right, what it proposes really works and is the nearest."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import batch_arithmetic, parse_config
from megarl.errors import ConfigError, WrongValue

SMALL = st.integers(min_value=1, max_value=12)


def tree(prompts: int, samples: int, mini_batches: int, dp: int, **rollout: Any) -> dict[str, Any]:
    return {
        "model": {"path": "nowhere"},
        "data": {"train": {"name": "basic_arithmetic"}, "max_prompt_tokens": 100},
        "rewards": [{"name": "reasoning_gym"}],
        "policy": {"layout": {"dp": dp}, "max_tokens_per_micro_batch": 300},
        "algorithm": {"advantage": "reinforce", "mini_batches": mini_batches, "epochs": 2},
        "rollout": {"prompts_per_step": prompts, "samples_per_prompt": samples, "max_new_tokens": 20, **rollout},
    }


@settings(max_examples=150, deadline=None)
@given(SMALL, SMALL, SMALL, SMALL)
def test_what_is_accepted_divides_evenly_and_what_is_refused_does_not(prompts: int, samples: int, mini: int, dp: int) -> None:
    divides = prompts * samples % mini == 0 and prompts * samples // mini % dp == 0
    try:
        numbers = batch_arithmetic(parse_config(tree(prompts, samples, mini, dp)))
    except ConfigError:
        assert not divides
        return
    assert divides
    assert numbers.sequences_per_rank * dp * mini == prompts * samples
    assert numbers.optimizer_steps_per_step == 2 * mini
    # first-fit of full-length sequences, counted one by one
    packs, room = 0, 0
    for _ in range(numbers.sequences_per_rank):
        if room < 120:
            packs, room = packs + 1, 300
        room -= 120
    assert numbers.micro_batches_per_rank_at_most == packs


@settings(max_examples=150, deadline=None)
@given(SMALL, SMALL, SMALL, SMALL)
def test_every_proposed_value_works(prompts: int, samples: int, mini: int, dp: int) -> None:
    try:
        parse_config(tree(prompts, samples, mini, dp))
        return
    except ConfigError as error:
        facts = error.facts
    assert isinstance(facts, WrongValue)
    if facts.field == "algorithm.mini_batches":
        for value in map(int, re.findall(r"\d+", facts.allowed)):
            assert prompts * samples % value == 0
        return
    in_dp, _, in_prompts = facts.allowed.partition(", or set rollout.prompts_per_step to ")
    for value in map(int, re.findall(r"\d+", in_dp)):
        parse_config(tree(prompts, samples, mini, value))
    proposed = [int(number) for number in re.findall(r"\d+", in_prompts)]
    for value in proposed:
        parse_config(tree(value, samples, mini, dp))
    nearest_above = next(p for p in range(prompts + 1, 10_000) if p * samples % (mini * dp) == 0)
    assert nearest_above in proposed


def test_the_critic_and_a_separate_reference_must_divide_too() -> None:
    uneven = tree(4, 2, 1, 1)
    uneven["algorithm"]["advantage"] = "gae"
    uneven["critic"] = {"layout": {"dp": 3}}
    with pytest.raises(ConfigError, match=r"critic\.layout\.dp is 3"):
        parse_config(uneven)
    uneven = tree(4, 2, 1, 1)
    uneven["reference"] = {"layout": {"dp": 3}}
    with pytest.raises(ConfigError, match=r"reference\.layout\.dp is 3"):
        parse_config(uneven)


def test_the_table_says_every_number() -> None:
    table = dict(batch_arithmetic(parse_config(tree(8, 4, 2, 2))).rows())
    per_rank = 8 * 4 // 2 // 2
    assert table["sequences per DP rank"] == f"{per_rank} = 16 / 2"
    packs = "of 300 tokens (sequences of up to 120)"
    assert table["micro-batches per DP rank"] == f"at most {math.ceil(per_rank / (300 // 120))} {packs}"
