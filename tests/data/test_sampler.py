"""Every epoch visits each prompt once, and a resumed sampler goes on where it stopped."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.held_out import count_held_out, drop_eval_overlap
from megarl.data.media import Media
from megarl.data.sample import Prompt, Sample
from megarl.data.sampler import RowSampler
from megarl.errors import CheckpointError, DataError


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(f"train-{i}", "", [i], str(i), {"answer": i}) for i in range(count)]


@given(st.integers(1, 12), st.lists(st.integers(0, 9), max_size=12), st.integers(0, 3))
def test_each_epoch_is_a_permutation_and_group_ids_are_unique(count: int, takes: list[int], seed: int) -> None:
    sampler = RowSampler(_prompts(count), seed)
    taken = [prompt for n in takes for prompt in sampler.next(n)]
    for epoch in range(-(-len(taken) // count)):
        visits = taken[epoch * count : (epoch + 1) * count]
        assert max(Counter(prompt.row_id for prompt in visits).values()) == 1
        assert [prompt.group_id for prompt in visits] == [f"{prompt.row_id}@{epoch}" for prompt in visits]
    assert len({prompt.group_id for prompt in taken}) == len(taken)
    assert all(prompt.prompt_ids == [prompt.row["answer"]] for prompt in taken)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 20))
def test_resumed_order_is_the_order_of_a_run_that_never_stopped(count: int, before: int, after: int) -> None:
    straight = RowSampler(_prompts(count), 5)
    expected = straight.next(before + after)[before:]
    stopped = RowSampler(_prompts(count), 5)
    stopped.next(before)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = RowSampler(_prompts(count), 5)
    resumed.next(3)
    resumed.load_state_dict(state)
    assert resumed.next(after) == expected


def test_order_follows_from_the_seed_and_differs_between_seeds_and_epochs() -> None:
    ids = [[p.row_id for p in RowSampler(_prompts(50), seed).next(100)] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0][:50] != ids[0][50:]
    assert ids[0][:50] != [f"train-{i}" for i in range(50)]


def test_the_order_is_the_one_that_earlier_checkpoints_stand_in() -> None:
    taken = [prompt.row_id for prompt in RowSampler(_prompts(30), 7).next(60)]
    for epoch in range(2):
        order = list(range(30))
        Random(f"7/{epoch}").shuffle(order)
        assert taken[30 * epoch : 30 * (epoch + 1)] == [f"train-{n}" for n in order]


def test_prompts_handed_out_are_copies() -> None:
    prompts = _prompts(1)
    first, second = RowSampler(prompts, 0).next(2)
    assert (first.group_id, second.group_id, prompts[0].group_id) == ("train-0@0", "train-0@1", "")


def test_state_of_another_data_set_is_refused() -> None:
    state = RowSampler(_prompts(4), 0).state_dict()
    with pytest.raises(CheckpointError, match=r"data\.train has 5 rows, and 4 in the checkpoint"):
        RowSampler(_prompts(5), 0).load_state_dict(state)


def test_rows_with_the_prompt_of_a_held_out_row_are_counted_once() -> None:
    def side(row: str, prompt: int, picture: str = "") -> Sample:
        media = [Media("image", (picture,), (1, 2, 2), 0, 1)] if picture else []
        return Sample(f"{row}/chosen", row, row, [prompt], [9], [1], [], [], "stop", media=media)

    train = [side("train-0", 1), side("train-0", 1), side("train-1", 2), side("train-2", 1, "cat"), side("train-3", 1, "dog")]
    assert count_held_out(train, [side("eval-0", 1)]) == 1
    assert count_held_out(train, [side("eval-0", 1, "dog"), side("eval-1", 2), side("eval-2", 7)]) == 2


def test_held_out_prompts_are_never_trained_on() -> None:
    train = [Prompt(f"train-{n}", "", [n % 5], "") for n in range(20)]
    held_out = [Prompt("eval-0", "", [2], ""), Prompt("eval-1", "", [4], "")]
    kept = drop_eval_overlap(train, held_out)
    assert [p.row_id for p in kept] == [f"train-{n}" for n in range(20) if n % 5 not in (2, 4)]
    with pytest.raises(DataError, match=r"no row that data\.eval and evaluations do not hold out"):
        drop_eval_overlap(train[2:3], held_out)
