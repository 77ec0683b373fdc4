"""Responses in a store make the same shares, mask and columns as those that the driver has."""

from __future__ import annotations

import pickle
import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.answers import Answers
from megarl.data.batch import Batch
from megarl.data.micro_batches import plan_micro_batches
from megarl.data.prefix_tree import common_prefixes, prefix_tree
from megarl.data.sample import Prompt, Sample
from megarl.data.shares import Share
from megarl.data.stored import Held, ResponseTokens, StoredGeneration, StoredSample, common_beginnings, version_runs
from megarl.data.stored_batch import StoredBatch, batch_of
from megarl.data.stored_shares import StoredShare
from megarl.models.flops import FlopsModel

FLOPS = FlopsModel(per_token=100, per_logit_row=10, per_pair=1)


def made(rng: random.Random, groups: int = 4, n: int = 3) -> tuple[list[Sample], list[StoredSample]]:
    """The same samples twice: with their tokens, and with these in a store, an answer for each group."""
    plain: list[Sample] = []
    stored: list[StoredSample] = []
    for number in range(groups):
        ids = [rng.randrange(50) for _ in range(rng.randrange(1, 6))]
        prompt = Prompt(f"row-{number}", f"group-{number}", ids, "asked", {"answer": number})
        begins = [rng.randrange(50) for _ in range(20)]
        responses = [
            begins[: rng.choice((0, 18, 20))] + [rng.randrange(50) for _ in range(rng.randrange(1, 9))] for _ in range(n)
        ]
        log_probs = [[float(np.float32(-rng.random())) for _ in response] for response in responses]
        versions = [sorted(rng.randrange(3) for _ in response) for response in responses]
        said = Held([f"text {index}" for index in range(n)])
        tokens, common = Held(ResponseTokens.of([ids], [0] * n, responses, log_probs, versions)), common_beginnings(responses)
        for index, response in enumerate(responses):
            reason = rng.choice(("stop", "length"))
            runs = version_runs(versions[index])
            generation = StoredGeneration(tokens, said, index, len(response), runs, reason, {}, common=common, member=index)
            stored.append(StoredSample(prompt, index, generation))
            ids_of = {"prompt_ids": ids, "response_ids": response, "sampled_mask": [1] * len(response)}
            names = {"sample_id": f"group-{number}/{index}", "group_id": f"group-{number}", "row_id": f"row-{number}"}
            of_tokens = {"rollout_log_probs": log_probs[index], "weight_versions": versions[index]}
            texts = {"prompt_text": "asked", "response_text": f"text {index}", "row": {"answer": number}}
            plain.append(Sample(**names, **ids_of, **of_tokens, finish_reason=reason, **texts))
    return plain, stored


def answers(batch: Batch, rows: list[int], columns: int, seed: int) -> Answers:
    """Random numbers for every token of `rows`."""
    lengths = batch.lengths.numpy()[rows]
    values = np.random.default_rng(seed).normal(size=(columns, int(lengths.sum()))).astype(np.float32)
    return Answers(np.array(rows, np.int64), lengths, values)


def assert_equal_shares(one: Share, other: Share) -> None:
    for entry in fields(Share):
        first, second = getattr(one, entry.name), getattr(other, entry.name)
        if isinstance(first, dict):
            assert first.keys() == second.keys()
            for name, column in first.items():
                np.testing.assert_array_equal(column, second[name])
        elif isinstance(first, np.ndarray):
            np.testing.assert_array_equal(first, second)
            assert first.dtype == second.dtype
        else:
            empty = [value if any(value) else () for value in (first, second)]  # of a replica that has none
            assert empty[0] == empty[1], entry.name


def whole(share: StoredShare) -> Share:
    return share.whole([stored.get() for stored in share.objects])


def test_samples_read_the_same() -> None:
    plain, stored = made(random.Random(0))
    for one, other in zip(plain, stored, strict=True):
        assert other.loaded() == one
        assert other.to_dict() == one.to_dict()
        assert (other.response_length, other.sampled_tokens, other.versions) == (
            one.response_length,
            one.sampled_tokens,
            one.versions,
        )
        assert other.total_length == one.total_length
        assert other.truncated == one.truncated
        changed = replace(other, response_text="another")
        assert type(changed) is Sample
        assert changed == replace(one, response_text="another")
        sent = pickle.loads(pickle.dumps(other))
        assert type(sent) is Sample
        assert sent == one
        assert other.for_work() == (one.sample_id, one.group_id, one.truncated, one.versions)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share_prefix", [True, False])
def test_shares_are_those_of_a_batch_that_the_driver_has(seed: int, share_prefix: bool) -> None:
    rng = random.Random(seed)
    plain, stored = made(rng)
    here, there = Batch(plain), batch_of(stored)
    assert isinstance(there, StoredBatch)
    rows = rng.sample(range(len(plain)), 9)
    first, second = rows[:4], rows[4:]
    values = [answers(here, first, 2, seed), answers(here, second, 2, seed + 100)]
    here.gather(["old_log_probs", "old_entropy"], values, asked=rows)
    there.take(
        ["old_log_probs", "old_entropy"], [(Held(value), part) for value, part in zip(values, (first, second), strict=True)]
    )
    here.columns["own"] = there.columns["own"] = torch.rand(here.mask.shape)
    of_rows = torch.rand(len(plain))
    here.columns["weights"] = torch.where(here.mask, of_rows[:, None], 0)
    there.columns.set_rows("weights", of_rows)
    for name, column in here.columns.items():
        torch.testing.assert_close(there.columns[name], column, rtol=0, atol=0)
    assert {*here.columns} == {*there.columns}
    check(here, there, rows, share_prefix=share_prefix)


def check(here: Batch, there: StoredBatch, rows: list[int], *, share_prefix: bool) -> None:
    """Both make the same shares of `rows`, with all columns."""
    units = here.unit_rows(rows, share_prefix=share_prefix)
    of_stored = there.unit_rows(rows, share_prefix=share_prefix)
    np.testing.assert_array_equal(units.rows, of_stored.rows)
    for one, other in zip(units.sizes, of_stored.sizes, strict=True):
        assert one._replace(common=other.common) == other
        count = len(one.response_tokens)
        assert [*one.common.repeats(range(count))] == [*other.common.repeats(range(count))]
    plan = plan_micro_batches(units.sizes, ranks=2, max_tokens=60, flops=FLOPS)
    names = [*here.columns]
    for one, other in zip(here.shares(units, plan, names), there.shares(units, plan, names), strict=True):
        assert other.scored_tokens == one.scored_tokens
        assert not len(other.token_ids)
        assert_equal_shares(whole(other), one)


def test_a_mask_that_lies_in_the_store() -> None:
    plain, stored = made(random.Random(3))
    here, there = Batch(plain), StoredBatch(stored)
    rows = [*range(len(plain))]
    value = answers(here, rows, 1, 0)
    value.columns[:] = value.columns > 0
    here.mask = torch.zeros_like(here.mask)
    for row, place in value.places.items():
        here.mask[row, : here.lengths[row]] = torch.tensor(value.columns[0, place]) > 0
    there.take_mask([(Held(value), rows)], 0, here.mask.sum(1))
    assert torch.equal(there.mask, here.mask)
    assert there.response_tokens == here.response_tokens
    there.columns.set_rows("weights", torch.arange(len(plain)))
    here.columns["weights"] = torch.where(here.mask, torch.arange(len(plain))[:, None], 0).float()
    check(here, there, rows, share_prefix=True)


def test_a_mask_and_marked_tokens_of_the_driver() -> None:
    plain, stored = made(random.Random(4))
    here, there = Batch(plain), StoredBatch(stored)
    here.mask[0] = False
    there.mask = here.mask
    check(here, there, [*range(len(plain))], share_prefix=True)
    units = here.unit_rows([0, 1, 2], share_prefix=True)
    plan = plan_micro_batches(units.sizes, ranks=1, max_tokens=60, flops=FLOPS)
    [one], [other] = (batch.shares(units, plan, [], mask=here.last_tokens) for batch in (here, there))
    assert_equal_shares(whole(other), one)
    assert other.scored_tokens == 3


def test_the_rows_of_a_share_as_a_batch() -> None:
    plain, stored = made(random.Random(7))
    here, there = Batch(plain), StoredBatch(stored)
    rows = [*range(len(plain))]
    value = answers(here, rows, 2, 0)
    here.gather(["values", "returns"], [value])
    there.take(["values", "returns"], [(Held(value), rows)])
    chosen = [1, 4, 5, 10]
    share = whole(there.lone_rows(chosen, [*there.columns]))
    part = Batch.of_share([there.samples[row].for_work() for row in chosen], share)
    width = part.mask.shape[1]
    assert torch.equal(part.mask, here.mask[chosen, :width])
    assert torch.equal(part.truncated, here.truncated[chosen])
    assert part.groups.tolist() == [0, 1, 1, 2]
    assert {*part.columns} == {*here.columns} == {"rollout_log_probs", "values", "returns"}
    for name, column in part.columns.items():
        assert torch.equal(column, here.columns[name][chosen, :width]), name


def test_a_column_of_another_length_is_refused() -> None:
    plain, stored = made(random.Random(5))
    there = StoredBatch(stored)
    wrong = answers(Batch(plain), [0], 1, 0)
    wrong = Answers(wrong.rows, wrong.lengths - 1, wrong.columns[:, :-1])
    there.take(["values"], [(Held(wrong), [0])])
    units = there.unit_rows([0, 1], share_prefix=False)
    plan = plan_micro_batches(units.sizes, ranks=1, max_tokens=60, flops=FLOPS)
    [share] = there.shares(units, plan, ["values"])
    with pytest.raises(ValueError, match=r"row 0 has \d+ tokens, but \d+ values"):
        whole(share)


def test_samples_of_both_kinds_come_to_the_driver() -> None:
    plain, stored = made(random.Random(6))
    mixed = batch_of([plain[0], *stored[1:]])
    assert type(mixed) is Batch
    torch.testing.assert_close(mixed.columns["rollout_log_probs"], Batch(plain).columns["rollout_log_probs"], rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(30))
def test_common_beginnings_of_some_responses(seed: int) -> None:
    rng = random.Random(seed)
    begins = [[rng.randrange(3) for _ in range(40)] for _ in range(2)]
    responses = [np.array([*rng.choice(begins)[: rng.randrange(41)], rng.randrange(3)], np.int32) for _ in range(6)]
    chosen = rng.sample(range(6), 4)
    part, direct = common_prefixes(responses).among(chosen), common_prefixes([responses[number] for number in chosen])
    lengths = [len(responses[number]) for number in chosen]

    def described(common: Any) -> list[Any]:
        nodes, ends = prefix_tree(common, lengths)
        paths = []
        for end in ends:
            path = []
            while end >= 0:
                path.append(nodes[end][1:])
                end = nodes[end].parent
            paths.append(path)
        return paths

    if any(direct.common):
        assert described(part) == described(direct)
        assert part.repeats(range(4)) == direct.repeats(range(4)) or sum(part.repeats(range(4))) == sum(
            direct.repeats(range(4))
        )
    else:
        assert not part.common
