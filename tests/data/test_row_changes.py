"""A run goes on over the rows of its checkpoint, over more of them, or over others, and only as its config says."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.sources import SourceConfig
from megarl.data.media import Media
from megarl.data.mixture import place_of_row
from megarl.data.mixture_sampler import MixtureSampler
from megarl.data.row_changes import row_hashes
from megarl.data.rows import Origin, RowPlace
from megarl.data.sample import Prompt
from megarl.data.sampler import RowSampler
from megarl.errors import CheckpointError


def prompts(count: int, what: str = "a", part: str = "train") -> list[Prompt]:
    return [Prompt(f"{part}-{i}", "", [i], str(i), {"answer": f"{what}{i}", "level": i % 4}) for i in range(count)]


def state_after(sampler: Any, taken: int) -> dict[str, Any]:
    sampler.next(taken)
    return json.loads(json.dumps(sampler.state_dict()))


def ids(records: list[Prompt]) -> list[str]:
    return [record.group_id for record in records]


def test_as_many_rows_with_other_contents_are_refused() -> None:
    state = state_after(RowSampler(prompts(6), 0), 4)
    assert RowSampler(prompts(6), 0).load_state_dict(state) == []
    with pytest.raises(
        CheckpointError, match=r"data\.train has 6 rows, and 6 in the checkpoint with other contents; .*restart"
    ):
        RowSampler(prompts(6, "b"), 0).load_state_dict(state)
    swapped = prompts(6)
    swapped[1], swapped[2] = swapped[2], swapped[1]
    with pytest.raises(CheckpointError, match="with other contents"):
        RowSampler(swapped, 0).load_state_dict(state)


def test_fewer_and_more_rows_are_refused_with_the_ways_on() -> None:
    state = state_after(RowSampler(prompts(6), 0), 4)
    with pytest.raises(CheckpointError, match=r"has 8 rows, and 6 in the checkpoint, which are the first of them; .*'append'"):
        RowSampler(prompts(8), 0).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"has 5 rows, and 6 in the checkpoint; .*'restart'"):
        RowSampler(prompts(5), 0).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"'append' and its first 6 rows are not those of the checkpoint"):
        RowSampler(prompts(8, "b"), 0).load_state_dict(state, "append")


@given(st.integers(1, 8), st.integers(0, 30), st.integers(1, 6), st.integers(0, 3))
def test_added_rows_follow_the_old_order_of_the_epoch(count: int, taken: int, more: int, seed: int) -> None:
    straight = RowSampler(prompts(count), seed)
    state = state_after(straight, taken)
    grown = RowSampler(prompts(count + more), seed)
    for _ in range(2):  # to the same place, however often it is gone to
        grown.load_state_dict(state, "append")
    left = -taken % count if taken else 0
    epoch = -(-taken // count) - 1 if taken else 0
    if taken:
        assert ids(grown.next(left)) == ids(straight.next(left)), "the old order comes first"
        new = grown.next(more)
        assert {row.row_id for row in new} == {f"train-{n}" for n in range(count, count + more)}
        assert {row.group_id.rpartition("@")[2] for row in new} == {str(epoch)}
    following = grown.next(count + more)
    assert Counter(row.row_id for row in following) == Counter(f"train-{n}" for n in range(count + more))
    fresh = RowSampler(prompts(count + more), seed)
    fresh.next((epoch + 1 if taken else 0) * (count + more))
    assert ids(following) == ids(fresh.next(count + more)), "later epochs are those of a run that had all rows"


def test_a_grown_epoch_goes_on_from_its_own_checkpoint_and_grows_again() -> None:
    state = state_after(RowSampler(prompts(6), 1), 4)
    grown = RowSampler(prompts(9), 1)
    grown.load_state_dict(state, "append")
    in_middle = state_after(grown, 3)  # two old rows and a new one
    resumed = RowSampler(prompts(9), 1)
    assert resumed.load_state_dict(in_middle) == []
    assert ids(resumed.next(12)) == ids(grown.next(12))
    again = RowSampler(prompts(11), 1)
    again.load_state_dict(in_middle, "append")
    rest = again.next(4)
    assert {row.row_id for row in rest[2:]} == {"train-9", "train-10"}
    assert {row.row_id for row in rest[:2]} < {"train-6", "train-7", "train-8"}
    assert len({row.row_id for row in again.next(11)}) == 11


def test_new_data_begins_with_its_first_row_and_new_ids() -> None:
    old = RowSampler(prompts(6), 1)
    before = ids(old.next(8))
    state = json.loads(json.dumps(old.state_dict()))
    new = RowSampler(prompts(4, "b"), 1)
    [said] = new.load_state_dict(state, "restart")
    assert "has 4 rows, and 6 in the checkpoint" in said
    first = new.next(4)
    assert {row.row_id for row in first} == {f"train-{n}" for n in range(4)}
    assert not {*ids(first)} & {*before}
    resumed = RowSampler(prompts(4, "b"), 1)
    assert resumed.load_state_dict(json.loads(json.dumps(new.state_dict())), "restart") == [], "once, not at each resume"
    assert ids(resumed.next(5)) == ids(new.next(5))


def test_a_checkpoint_without_a_digest_goes_on_with_a_warning() -> None:
    state = state_after(RowSampler(prompts(6), 0), 4)
    del state["digest"]
    straight, resumed = RowSampler(prompts(6), 0), RowSampler(prompts(6, "b"), 0)
    [said] = resumed.load_state_dict(state)
    assert said.startswith("warning: data.train: this checkpoint of an earlier version does not tell which rows it had")
    assert ids(resumed.next(5)) == ids(straight.next(9))[4:]
    with pytest.raises(CheckpointError, match="has 7 rows, and 6"):
        RowSampler(prompts(7), 0).load_state_dict(state)


def test_parts_of_a_mixture_grow_and_are_added() -> None:
    def mixture(*counts: int) -> MixtureSampler[Prompt]:
        parts = [prompts(count, part=f"train-{number}") for number, count in enumerate(counts)]
        return MixtureSampler(parts, [1.0] * len(counts), 3)

    state = state_after(mixture(3, 4), 5)
    with pytest.raises(CheckpointError, match=r"data\.train\.parts\[1\] has 6 rows, and 4 in the checkpoint"):
        mixture(3, 6).load_state_dict(state)
    assert len(mixture(3, 6).load_state_dict(state, "append")) == 1
    with pytest.raises(CheckpointError, match=r"data\.train has 3 parts, and 2 in the checkpoint"):
        mixture(3, 4, 2).load_state_dict(state)
    wider = mixture(3, 4, 2)
    assert wider.load_state_dict(state, "append") == ["data.train.parts[2] is new: it begins with its first row"]
    assert "train-2-0@0" in ids(wider.next(30))
    single = RowSampler(prompts(3), 3)
    with pytest.raises(CheckpointError, match="is a single source, and a mixture of 2 parts"):
        single.load_state_dict(state)
    assert len(single.load_state_dict(state, "restart")) == 1


def test_weights_by_step_follow_the_steps_of_the_run_when_steps_grow() -> None:
    """Two steps of two draws each, then steps of four: the weights are those of step 2, and not of step 1."""
    parts = [prompts(50, part=f"train-{number}") for number in range(2)]
    weights = [{0: 1.0, 1: 1.0, 2: 0.0}, {0: 0.0, 1: 0.0, 2: 1.0}]
    small = MixtureSampler(parts, weights, 0, rows_per_step=2)
    state = state_after(small, 4)
    large = MixtureSampler(parts, weights, 0, rows_per_step=4)
    large.load_state_dict(state)
    assert {row.row_id.split("-")[1] for row in large.next(8)} == {"1"}
    again = MixtureSampler(parts, weights, 0, rows_per_step=4)
    again.load_state_dict(json.loads(json.dumps(large.state_dict())))
    assert ids(again.next(8)) == ids(large.next(8))


def test_a_row_is_its_contents_whatever_the_order_of_keys_and_the_folder_of_kept_pictures() -> None:
    def of(row: dict[str, Any], media: bool = False) -> int:
        shown = [Media("image", ("0" * 32,), (1, 2, 2), 0, 1)] if media else []
        [number] = row_hashes([Prompt("train-0", "", [0], "", row, shown)], lambda row_id: RowPlace(Origin("data.train"), 0))
        return number

    assert of({"a": 1, "b": [2]}) == of({"b": [2], "a": 1}) != of({"a": 1, "b": [3]})
    kept = "0123456789abcdef" * 2 + ".png"
    assert of({"images": [f"runs/a/media/{kept}"]}, media=True) == of({"images": [f"runs/b/media/{kept}"]}, media=True)
    assert of({"images": [f"runs/a/{kept}"]}) != of({"images": [f"runs/b/{kept}"]})
    assert of({1: "a", "b": object()}) == of({1: "a", "b": object()})  # nothing of an address in memory


def test_a_generated_row_is_its_task_arguments_and_seed() -> None:
    """Some tasks order sets of texts, so that their rows have other contents in every process."""

    def sampler(what: str, **fields: Any) -> RowSampler[Prompt]:
        source = SourceConfig(**{"name": "word_ladder", "args": {"min_word_length": 3}, **fields})
        return RowSampler(prompts(4, what), 0, place_of=partial(place_of_row, source=source))

    state = state_after(sampler("a"), 1)
    assert sampler("b").load_state_dict(state) == []
    for other in ({"seed": 1}, {"name": "basic_arithmetic"}, {"args": {}}, {"source": "jsonl", "path": "rows.jsonl"}):
        with pytest.raises(CheckpointError, match="with other contents"):
            sampler("a", **other).load_state_dict(state)


def test_what_a_reward_writes_into_a_row_does_not_change_the_data() -> None:
    rows = prompts(3)
    sampler = RowSampler(rows, 0)
    rows[0].row["seen"] = True
    assert RowSampler(prompts(3), 0).load_state_dict(state_after(sampler, 1)) == []
