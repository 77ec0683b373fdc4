"""What travels between the driver and its replicas: element by element what one sequence after another would give."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.data.answers import Answers
from megarl.data.batch import Batch
from megarl.data.media import Media
from megarl.data.micro_batches import Assignment, UnitSize, plan_micro_batches
from megarl.data.sample import Sample
from megarl.data.shares import Share
from megarl.data.stream import MicroBatch, Response, ScorePosition, Unit, pack
from megarl.models.flops import FlopsModel
from megarl.models.update_flops import update_flops

FLOPS = FlopsModel(per_token=7, per_logit_row=3, per_pair=2)
COLUMNS = ("advantages", "weights")


class Case(NamedTuple):
    """A batch, the rows of a step in their order, how they are shared out, and what is scored (None: what was sampled)."""

    samples: list[Sample]
    rows: list[int]
    share_prefix: bool
    keep_groups: bool
    ranks: int
    max_tokens: int
    at: Tensor | None

    def batch(self) -> Batch:
        batch = Batch(self.samples)
        for number, name in enumerate(COLUMNS):
            batch.columns[name] = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(number))
        # A column in another precision and one whose memory is not its own travel as they are.
        batch.columns["wide"] = batch.columns["weights"].double() / 3
        batch.columns["pair"] = batch.groups[:, None].float().expand(batch.mask.shape)
        return batch


@st.composite
def cases(draw: Any) -> Case:
    """Groups of one to five responses, some of them empty, some groups with two prompts; rows in any order, or some of them."""
    samples: list[Sample] = []
    for group in range(draw(st.integers(1, 5))):
        prompts = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=2))
        for _ in range(draw(st.integers(1, 5))):
            ids = draw(st.lists(st.integers(0, 150_000), max_size=9))
            mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
            log_probs = draw(st.lists(st.floats(-9, 0), min_size=len(ids), max_size=len(ids)))
            prompt, name = draw(st.sampled_from(prompts)), f"g{group}"
            told = draw(st.lists(st.integers(0, len(ids) - 1), unique=True, max_size=2).map(sorted)) if ids else []
            media = [Media("image", (f"{group}.{at}",), (1, 2, 2), len(prompt) + at, 1) for at in told]
            samples.append(
                Sample(str(len(samples)), name, name, prompt, ids, mask, log_probs, [0] * len(ids), "stop", media=media)
            )
    order = draw(st.permutations(range(len(samples))))
    rows = order[: draw(st.integers(1, len(order)))]
    share_prefix, keep_groups = draw(st.sampled_from([(True, False), (False, False), (True, True)]))
    longest = max(len(sample.response_ids) for sample in samples)
    at = torch.rand(len(samples), longest, generator=torch.Generator().manual_seed(9)) < 0.5 if draw(st.booleans()) else None
    ranks = draw(st.integers(1, 4))
    return Case(samples, rows, share_prefix, keep_groups, ranks, draw(st.sampled_from([8, 20, 60, 1000])), at)


def plain_units(case: Case) -> MicroBatch:
    """The units of a step, one response after another, each as tensors of its own."""
    batch, units = case.batch(), {}
    columns = {name: [row.clone() for row in column] for name, column in batch.columns.items()}
    for row in case.rows:
        sample = case.samples[row]
        size = len(sample.response_ids)
        mask = torch.tensor(sample.sampled_mask).bool() if case.at is None else case.at[row, :size]
        response = Response(
            row,
            torch.tensor(sample.response_ids, dtype=torch.long),
            mask,
            {name: values[row][:size] for name, values in columns.items()},
            tuple(replace(media, place=media.place - len(sample.prompt_ids)) for media in sample.media),
        )
        key = (sample.group_id, tuple(sample.prompt_ids)) if case.share_prefix else row
        units.setdefault(key, Unit(torch.tensor(sample.prompt_ids), [])).responses.append(response)
    return list(units.values())


def plain_plan(units: MicroBatch, case: Case) -> Assignment:
    sizes = [UnitSize(len(unit.prompt_ids), tuple(len(r.token_ids) for r in unit.responses)) for unit in units]
    return plan_micro_batches(sizes, ranks=case.ranks, max_tokens=case.max_tokens, flops=FLOPS, whole_units=case.keep_groups)


def shares_of(case: Case) -> list[Share]:
    batch = case.batch()
    units = batch.unit_rows(case.rows, share_prefix=case.share_prefix)
    plan = plan_micro_batches(
        units.sizes, ranks=case.ranks, max_tokens=case.max_tokens, flops=FLOPS, whole_units=case.keep_groups
    )
    return batch.shares(units, plan, list(batch.columns), mask=case.at)


def travelled(value: Any) -> Any:
    """`value` after a journey through Ray's store, in which buffers cannot be written to."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers])


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_same_responses(found: Response, expected: Response) -> None:
    assert found.index == expected.index
    assert found.media == expected.media
    assert same(found.token_ids, expected.token_ids)
    assert same(found.mask, expected.mask)
    assert found.columns.keys() == expected.columns.keys()
    assert all(same(column, expected.columns[name]) for name, column in found.columns.items())


@pytest.mark.filterwarnings("error::UserWarning")  # torch warns of tensors over memory that cannot be written to
@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_replica_gets_what_one_sequence_after_another_would_give(case: Case) -> None:
    units = plain_units(case)
    if sum(1 if case.keep_groups else len(unit.responses) for unit in units) < case.ranks:
        with pytest.raises(ValueError, match="cannot be shared among"):
            shares_of(case)
        return
    expected = [
        [[Unit(units[u].prompt_ids, [units[u].responses[p] for p in places]) for u, places in pieces] for pieces in share]
        for share in plain_plan(units, case)
    ]
    found = [list(share) for share in travelled(shares_of(case))]
    assert [[len(m) for m in share] for share in found] == [[len(m) for m in share] for share in expected]
    ours_and_theirs = [
        [unit for share in shares for micro_batch in share for unit in micro_batch] for shares in (found, expected)
    ]
    for ours, theirs in zip(*ours_and_theirs, strict=True):
        assert same(ours.prompt_ids, theirs.prompt_ids)
        for response, plain in zip(ours.responses, theirs.responses, strict=True):
            assert_same_responses(response, plain)


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(ScorePosition), st.booleans(), st.booleans())
def test_operations_are_counted_as_response_by_response(
    case: Case, position: ScorePosition, shared: bool, logits: bool
) -> None:
    expected, units = 0, plain_units(case)
    for unit in units:
        fed = [max(len(response.token_ids) - (position is ScorePosition.NEXT), 0) for response in unit.responses]
        for lengths in [fed] if shared else [[length] for length in fed]:
            expected += 3 * (FLOPS.cost(len(unit.prompt_ids), lengths) - FLOPS.per_logit_row * sum(lengths))
        expected += 3 * FLOPS.per_logit_row * sum(int(r.mask.sum()) for r in unit.responses) * logits
    whole = case._replace(ranks=1, max_tokens=10**6)
    counted = update_flops(FLOPS, shares_of(whole), shared_prompts=shared, position=position, logits=logits)
    assert counted.total == expected


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 3), st.integers(1, 5))
def test_answers_are_per_token_values_by_response_and_come_back_to_their_rows(case: Case, columns: int, ranks: int) -> None:
    """Streams of several ranks, to answers, through the store, to columns: zero where nothing is scored, and beyond the end."""
    batch = case.batch()
    units = [
        Unit(torch.tensor([1]), [Response(row, torch.zeros(n, dtype=torch.long), batch.mask[row, :n], {})])
        for row, n in enumerate(batch.lengths.tolist())
    ]
    expected = torch.zeros(columns, *batch.mask.shape)
    answers: list[Answers | None] = [None]  # a rank that does not report
    for share in [units[rank::ranks] for rank in range(ranks) if units[rank::ranks]]:
        streams = [pack(share[first : first + 2]) for first in range(0, len(share), 2)]
        parts = []
        for stream in streams:
            values = torch.rand(len(stream.rows), columns, dtype=torch.float64)
            parts.append(stream.answers(values))
            scored = [(row, int(place)) for row, places, _ in stream.owners for place in places]
            for (row, place), value in zip(scored, values, strict=True):
                expected[:, row, place] = value.float()
        answers.append(travelled(Answers.joined(parts)))
    for row, values in {row: values for answer in answers if answer for row, values in answer.items()}.items():
        assert torch.equal(values, expected[:, row, : len(values)].T)
        assert len(values) == batch.lengths[row]
    names = [f"c{number}" for number in range(columns)]
    batch.gather(names, answers)
    for name, column in zip(names, expected, strict=True):
        assert same(batch.columns[name], column)


def pickled(value: Any) -> tuple[int, int]:
    """Bytes of the pickle itself, and the number of buffers beside it."""
    buffers: list[pickle.PickleBuffer] = []
    return len(pickle.dumps(value, protocol=5, buffer_callback=buffers.append)), len(buffers)


def test_a_share_and_an_answer_are_as_many_buffers_for_any_number_of_sequences() -> None:
    def travelling(count: int) -> list[tuple[int, int]]:
        samples = [Sample(str(r), "g", "g", [1, 2], [3] * 5, [1] * 5, [-1.0] * 5, [0] * 5, "stop") for r in range(count)]
        batch = Batch(samples)
        units = batch.unit_rows(range(count), share_prefix=False)
        plan = plan_micro_batches(units.sizes, ranks=2, max_tokens=14, flops=FLOPS)
        share, _ = batch.shares(units, plan, ["rollout_log_probs"])
        rows = np.arange(count)
        return [pickled(share), pickled(Answers(rows, batch.lengths.numpy(), np.zeros((2, 5 * count), np.float32)))]

    few, many = travelling(4), travelling(4000)
    assert [buffers for _, buffers in few] == [buffers for _, buffers in many] == [9, 3]
    # The pickles themselves hold shapes alone, whose digits may need a few bytes more.
    assert all(abs(one - other) < 64 for (one, _), (other, _) in zip(few, many, strict=True))


def test_a_share_carries_no_other_replicas_tokens() -> None:
    def travelling(ranks: int) -> int:
        samples = [
            Sample(str(r), "g", "g", [1, 2], [3] * 50, [1] * 50, [-1.0] * 50, [0] * 50, "stop") for r in range(2 * ranks)
        ]
        batch = Batch(samples)
        units = batch.unit_rows(range(2 * ranks), share_prefix=False)
        plan = plan_micro_batches(units.sizes, ranks=ranks, max_tokens=1000, flops=FLOPS)
        return len(pickle.dumps(batch.shares(units, plan, ["rollout_log_probs"])[0], protocol=5))

    assert travelling(32) == travelling(1)


def test_an_answer_of_another_length_is_an_error() -> None:
    batch = Batch([Sample("0", "g", "g", [1], [2, 3], [1, 1], [-1.0] * 2, [0] * 2, "stop")])
    with pytest.raises(ValueError, match="row 0 has 2 tokens, but was answered with 1"):
        batch.gather(["values"], [Answers(np.array([0]), np.array([1]), np.zeros((1, 1), np.float32))])
