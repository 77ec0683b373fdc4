"""The invariants at the top of plan.py, on any input, and its costs against a count of every operation."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.micro_batches import Assignment, UnitPart, UnitSize, plan_micro_batches
from megarl.data.prefix_tree import CommonPrefixes
from megarl.models.flops import FlopsModel


@st.composite
def unit_sizes(draw: st.DrawFn) -> UnitSize:
    """Responses that may begin alike, two that stand beside each other in an order with no more tokens than both have."""
    lengths = draw(st.lists(st.integers(0, 80), min_size=1, max_size=8))
    if not draw(st.booleans()):
        return UnitSize(draw(st.integers(1, 60)), tuple(lengths))
    order = draw(st.permutations(range(len(lengths))))
    common = tuple(draw(st.integers(0, min(lengths[a], lengths[b]))) for a, b in pairwise(order))
    return UnitSize(draw(st.integers(1, 60)), tuple(lengths), common=CommonPrefixes(tuple(order), common))


UNITS = st.lists(unit_sizes(), min_size=1, max_size=14)
FLOPS = st.builds(FlopsModel, st.sampled_from([1, 10, 1000]), st.sampled_from([0, 1, 10, 1000]), st.sampled_from([0, 1, 5]))
MAX_TOKENS = st.sampled_from([5, 50, 100, 300, 4000])


def _piece_cost(units: list[UnitSize], flops: FlopsModel, piece: UnitPart, *, copied: bool = False) -> int:
    unit, places = piece
    lengths = [units[unit].response_tokens[place] for place in places]
    if copied:
        return sum(flops.cost(units[unit].prompt_tokens, [length]) for length in lengths)
    return flops.cost(units[unit].prompt_tokens, lengths, (), units[unit].common.repeats(places))


def _rank_costs(units: list[UnitSize], flops: FlopsModel, plan: Assignment, *, copied: bool = False) -> list[int]:
    return [sum(_piece_cost(units, flops, piece, copied=copied) for batch in share for piece in batch) for share in plan]


@settings(max_examples=400, deadline=None)
@given(UNITS, st.integers(1, 6), MAX_TOKENS, FLOPS, st.booleans())
def test_plan_keeps_every_invariant(
    units: list[UnitSize], ranks: int, max_tokens: int, flops: FlopsModel, copied: bool
) -> None:
    everything = [(unit, place) for unit, size in enumerate(units) for place in range(len(size.response_tokens))]
    if len(everything) < ranks:
        with pytest.raises(ValueError, match="cannot be shared among"):
            plan_micro_batches(units, ranks=ranks, max_tokens=max_tokens, flops=flops, copied_prompts=copied)
        return
    plan = plan_micro_batches(units, ranks=ranks, max_tokens=max_tokens, flops=flops, copied_prompts=copied)
    planned = Counter((unit, place) for share in plan for batch in share for unit, places in batch for place in places)
    assert planned == Counter(everything)
    assert len(plan) == ranks
    counts = {len(share) for share in plan}
    assert len(counts) == 1
    count = counts.pop()
    assert count >= 1
    for batch in (batch for share in plan for batch in share):
        assert batch
        assert len({unit for unit, _ in batch}) == len(batch)
        assert all(places and list(places) == sorted(places) for _, places in batch)
        tokens = sum(units[u].response_tokens[at] for u, places in batch for at in places)
        tokens -= 0 if copied else sum(sum(units[u].common.repeats(places)) for u, places in batch)
        tokens += sum(units[u].prompt_tokens * (len(places) if copied else 1) for u, places in batch)
        if tokens > max_tokens and sum(len(places) for _, places in batch) > 1:
            assert (count + 1) * ranks > len(everything), "there was room for another micro-batch on every rank"
    costs = _rank_costs(units, flops, plan, copied=copied)
    whole = [(number, tuple(range(len(unit.response_tokens)))) for number, unit in enumerate(units)]
    largest = max(_piece_cost(units, flops, piece, copied=copied) for piece in whole)
    assert max(costs) <= sum(costs) / ranks + largest
    assert plan == plan_micro_batches(units, ranks=ranks, max_tokens=max_tokens, flops=flops, copied_prompts=copied)


def test_equal_groups_stay_whole_and_balance_exactly() -> None:
    units = [UnitSize(20, (10,) * 8)] * 8
    plan = plan_micro_batches(units, ranks=4, max_tokens=1000, flops=FlopsModel(1, 1, 1))
    assert [[[piece[1] for piece in batch] for batch in share] for share in plan] == [[[tuple(range(8))] * 2]] * 4


def test_groups_are_split_where_whole_ones_cannot_balance() -> None:
    flops = FlopsModel(1, 1, 0)
    units = [UnitSize(4, (50,) * 8)] * 3
    plan = plan_micro_batches(units, ranks=2, max_tokens=10_000, flops=flops)
    costs = _rank_costs(units, flops, plan)
    assert max(costs) <= 1.05 * sum(costs) / 2  # whole groups would cost 1.33 times the mean
    assert sum(len(batch) for share in plan for batch in share) == 4  # one group in two, the others whole


def test_groups_above_the_limit_are_cut_into_as_few_pieces_as_fit() -> None:
    plan = plan_micro_batches([UnitSize(10, (30,) * 6)], ranks=1, max_tokens=100, flops=FlopsModel(1, 0, 0))
    assert sorted(len(places) for share in plan for batch in share for _, places in batch) == [3, 3]


def test_responses_without_shared_prompts_balance_by_cost_not_by_count() -> None:
    flops = FlopsModel(1, 0, 1)
    units = [UnitSize(1, (length,)) for length in (400, 100, 100, 100, 100, 100, 100, 100)]
    costs = _rank_costs(units, flops, plan_micro_batches(units, ranks=2, max_tokens=10_000, flops=flops))
    assert max(costs) == flops.cost(1, [400])  # 400 tokens cost more than seven times 100


def test_large_plans_take_less_than_seconds() -> None:
    units = [UnitSize(100 + i % 37, tuple(50 + (i * 31 + j * 97) % 900 for j in range(16))) for i in range(128)]
    flops = FlopsModel(per_token=2 * 24 * (1024 * 64 * 40 + 3 * 1024 * 4096), per_logit_row=65_536_000, per_pair=98_304)
    costs = _rank_costs(units, flops, plan_micro_batches(units, ranks=16, max_tokens=8192, flops=flops))
    assert max(costs) <= 1.06 * sum(costs) / 16


def test_unit_without_responses_is_refused() -> None:
    with pytest.raises(ValueError, match="a unit has no responses"):
        plan_micro_batches([UnitSize(1, ()), UnitSize(1, (1,))], ranks=1, max_tokens=9, flops=FlopsModel(1, 1, 1))
