"""A step's columns: answers of the ranks come back to the row and token they are of, in whatever order they arrive."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.data.answers import Answers
from megarl.data.batch import Batch
from megarl.data.media import Media
from megarl.data.micro_batches import plan_micro_batches
from megarl.data.sample import Sample
from megarl.data.stream import pack
from megarl.data.supervised import behind_prompt, units_of
from megarl.models.flops import FlopsModel
from megarl.models.update_flops import pictures_of


def _sample(row: int, group: str, prompt: list[int], response: list[int], mask: list[int]) -> Sample:
    log_probs = [-0.5 - token for token in response]
    return Sample(f"s{row}", group, group, prompt, response, mask, log_probs, [0] * len(response), "stop")


def _batch() -> Batch:
    return Batch(
        [
            _sample(0, "b", [1, 2], [10, 11, 12], [1, 0, 1]),
            _sample(1, "a", [3], [13], [1]),
            _sample(2, "b", [1, 2], [14, 15], [1, 1]),
            _sample(3, "a", [3], [], []),
            _sample(4, "b", [1, 9], [16, 17], [0, 1]),
        ]
    )


def test_rows_are_padded_on_the_right_and_groups_follow_the_ids_not_the_places() -> None:
    batch = _batch()
    assert batch.mask.int().tolist() == [[1, 0, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert batch.columns["rollout_log_probs"].tolist() == [
        [-10.5, -11.5, -12.5], [-13.5, 0, 0], [-14.5, -15.5, 0], [0, 0, 0], [-16.5, -17.5, 0],
    ]  # fmt: skip
    assert batch.groups.tolist() == [0, 1, 0, 1, 0]
    assert (len(batch), batch.response_tokens) == (5, 6)


def test_pictures_travel_with_their_prompts_and_tell_equal_ids_apart() -> None:
    red, blue = (Media("image", (name,), (1, 2, 2), 0, 1) for name in ("red", "blue"))
    samples = _batch().samples
    samples[0].media, samples[2].media = [red], [blue]  # of one group, with equal ids
    batch = Batch(samples)
    whole = batch.unit_rows([0, 1, 2, 3, 4], share_prefix=True)
    plan = [[[(0, (0,)), (1, (0, 1))], [(2, (0,)), (3, (0,))]]]
    [share] = pickle.loads(pickle.dumps(batch.shares(whole, plan, [])))
    units = [unit for units in share for unit in units]
    assert [unit.media for unit in units] == [(red,), (), (blue,), ()]
    first, second = share.cut([1, 1])
    assert [unit.media for part in (first, second) for units in part for unit in units] == [(red,), (), (blue,), ()]
    [without] = _batch().shares(whole, [[[(0, (0,))]]], [])
    assert without.media == ()


def test_responses_with_a_prompt_each_have_its_pictures_computed_once_where_they_fit_into_a_micro_batch() -> None:
    """Eight groups of four whose rows are mixed; a micro-batch has room for four responses with their prompts."""
    samples = []
    for row in range(32):
        group = row % 8
        sample = _sample(row, f"g{group}", [1] * 10, [2] * 5, [1] * 5)
        sample.media = [Media("image", (f"p{group}",), (1, 2, 2), 0, 1)]
        samples.append(sample)
    batch = Batch(samples)
    shared = batch.unit_rows(range(32), share_prefix=True)
    flops = FlopsModel(per_token=1, per_logit_row=0, per_pair=0)
    plan = plan_micro_batches(shared.sizes, ranks=2, max_tokens=60, flops=flops, copied_prompts=True)
    units, apart = shared.with_copied_prompts(plan)
    shares = batch.shares(units, apart, ["rollout_log_probs"])
    assert [len(pictures) for share in shares for pictures in pictures_of(share)] == [1] * 8
    expected = batch.unit_rows(range(32), share_prefix=False)
    assert sorted(units.sizes) == sorted(expected.sizes)
    found = [(response.index, unit.media) for share in shares for unit in chain(*share) for response in unit.responses]
    assert sorted(found) == [(row, tuple(sample.media)) for row, sample in enumerate(samples)]


def test_a_response_behind_another_prompt_takes_its_own_pictures_along() -> None:
    red, blue, green = (Media("image", (name,), (1, 2, 2), place, 1) for name, place in (("red", 0), ("blue", 4), ("green", 1)))
    samples = _batch().samples
    one = replace(samples[0], prompt_ids=[1, 2, 3], media=[red, blue])
    other = replace(samples[2], prompt_ids=[4, 5], media=[green])
    moved = behind_prompt(one, other)
    assert (moved.prompt_ids, moved.response_ids) == (other.prompt_ids, one.response_ids)
    assert moved.media == [green, replace(blue, place=3)]
    assert moved.response_media == one.response_media == (replace(blue, place=1),)


def answers_of(values: dict[int, Tensor]) -> Answers:
    """`{row: [L, C]}` as a rank gives it."""
    rows, lengths = np.array([*values], np.int64), np.array([len(own) for own in values.values()], np.int64)
    return Answers(rows, lengths, torch.cat([*values.values(), torch.zeros(0, 2)]).T.numpy())


@given(st.permutations(range(5)), st.lists(st.integers(0, 5), min_size=2, max_size=2).map(sorted))
def test_gathered_columns_do_not_depend_on_which_rank_answered(order: list[int], cuts: list[int]) -> None:
    batch = _batch()
    answers = [
        answers_of({row: torch.stack([100.0 * row + torch.arange(n), -torch.arange(n)], 1)
                    for row in part for n in [len(batch.samples[row].response_ids)]})
        for part in (order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :])
    ]  # fmt: skip
    batch.gather(["values", "entropy"], answers)
    for row, sample in enumerate(batch.samples):
        for t in range(3):
            inside = t < len(sample.response_ids)
            assert batch.columns["values"][row, t] == (100.0 * row + t if inside else 0)
            assert batch.columns["entropy"][row, t] == (-t if inside else 0)


def test_a_row_answered_twice_or_not_at_all_is_an_error() -> None:
    batch = _batch()
    answers = [answers_of({row: torch.zeros(int(batch.lengths[row]), 2)}) for row in range(5)]
    with pytest.raises(ValueError, match="1 of 5 rows were not answered"):
        batch.gather(["values", "entropy"], answers[:4])
    with pytest.raises(ValueError, match="row 0 was answered by two ranks"):
        batch.gather(["values", "entropy"], [*answers, answers[0]])
    assert "values" not in batch.columns


@pytest.mark.parametrize("share", [True, False])
def test_what_is_packed_comes_back_to_its_row_and_token(share: bool) -> None:
    """Batch → units → stream → split → gather is the identity on sampled tokens."""
    batch = _batch()
    column = torch.arange(15.0).reshape(5, 3) + 1
    batch.columns["advantages"] = column
    units = units_of(batch, [4, 2, 0, 1, 3], ["advantages"], share_prefix=share)
    # Rows 0 and 2 share group and prompt; row 4 is of their group but has another prompt.
    shared = [[4], [2, 0], [1, 3]] if share else [[4], [2], [0], [1], [3]]
    assert [[response.index for response in unit.responses] for unit in units] == shared
    stream = pack(units, pad_to_multiple=4)
    assert len(stream.token_ids) % 4 == 0
    # In the stream's order each scored token is one that the policy sampled.
    assert sorted(stream.targets.tolist()) == [10, 12, 13, 14, 15, 17]
    # The position that predicts a token holds the one before it in prompt + response, at its place there.
    scored = [(batch.samples[row], int(place)) for row, places, _ in stream.owners for place in places]
    before = [[*sample.prompt_ids, *sample.response_ids][len(sample.prompt_ids) + place - 1] for sample, place in scored]
    assert stream.token_ids[stream.rows].tolist() == before
    assert stream.position_ids[stream.rows].tolist() == [len(s.prompt_ids) + place - 1 for s, place in scored]
    assert stream.targets.tolist() == [sample.response_ids[place] for sample, place in scored]
    batch.gather(["back"], [stream.answers(stream.columns["advantages"][:, None])])
    assert torch.equal(batch.columns["back"], torch.where(batch.mask, column, 0))
