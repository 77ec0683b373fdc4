"""The invariants at the top of plan.py, on any input, and its costs against a count of every operation."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.plan import Assignment, FlopsModel, UnitSize, plan_micro_batches
from megarl.errors import ModelError

UNITS = st.lists(
    st.builds(UnitSize, st.integers(1, 60), st.lists(st.integers(0, 80), min_size=1, max_size=8).map(tuple)),
    min_size=1,
    max_size=14,
)
FLOPS = st.builds(FlopsModel, st.sampled_from([1, 10, 1000]), st.sampled_from([0, 1, 10, 1000]), st.sampled_from([0, 1, 5]))
MAX_TOKENS = st.sampled_from([5, 50, 100, 300, 4000])


def _piece_cost(units: list[UnitSize], flops: FlopsModel, unit: int, places: tuple[int, ...]) -> int:
    return flops.cost(units[unit].prompt_tokens, [units[unit].response_tokens[place] for place in places])


def _rank_costs(units: list[UnitSize], flops: FlopsModel, plan: Assignment) -> list[int]:
    return [sum(_piece_cost(units, flops, *piece) for batch in share for piece in batch) for share in plan]


@settings(max_examples=400, deadline=None)
@given(UNITS, st.integers(1, 6), MAX_TOKENS, FLOPS)
def test_plan_keeps_every_invariant(units: list[UnitSize], ranks: int, max_tokens: int, flops: FlopsModel) -> None:
    everything = [(unit, place) for unit, size in enumerate(units) for place in range(len(size.response_tokens))]
    if len(everything) < ranks:
        with pytest.raises(ValueError, match="cannot be shared among"):
            plan_micro_batches(units, ranks=ranks, max_tokens=max_tokens, flops=flops)
        return
    plan = plan_micro_batches(units, ranks=ranks, max_tokens=max_tokens, flops=flops)
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
        tokens = sum(units[u].prompt_tokens + sum(units[u].response_tokens[at] for at in places) for u, places in batch)
        if tokens > max_tokens and sum(len(places) for _, places in batch) > 1:
            assert (count + 1) * ranks > len(everything), "there was room for another micro-batch on every rank"
    costs = _rank_costs(units, flops, plan)
    largest = max(flops.cost(unit.prompt_tokens, unit.response_tokens) for unit in units)
    assert max(costs) <= sum(costs) / ranks + largest
    assert plan == plan_micro_batches(units, ranks=ranks, max_tokens=max_tokens, flops=flops)


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


def test_flops_are_those_of_every_multiplication_written_out() -> None:
    hidden, layers, heads, kv_heads, head_dim, ffn, vocab = 6, 3, 4, 2, 5, 7, 11
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    flops = FlopsModel.from_hf_config({**sizes, "head_dim": head_dim, "intermediate_size": ffn, "vocab_size": vocab})
    prompt, responses = 4, (3, 0, 2)
    matrices = [(hidden, heads * head_dim), (heads * head_dim, hidden)]
    matrices += [(hidden, kv_heads * head_dim)] * 2 + [(hidden, ffn)] * 2 + [(ffn, hidden)]
    expected = 0
    for tokens, first in [(prompt, 0), *((length, prompt) for length in responses)]:
        for position in range(tokens):
            seen = first + position + 1
            expected += layers * sum(2 * rows * columns for rows, columns in matrices)
            expected += layers * heads * seen * head_dim * 2 * 2  # scores, and the weighted sum of values
            expected += 2 * hidden * vocab if first else 0
    assert flops.cost(prompt, responses) == expected


def test_flops_of_experts_and_latent_attention_are_those_of_every_matrix_a_token_meets() -> None:
    """Each layer's matrices written out: a dense one, then experts (two of five and a shared one) behind latent attention."""
    hidden, heads, q_rank, kv_rank, nope, rope, value, ffn, vocab = 6, 4, 5, 3, 7, 2, 8, 9, 11
    latent = {"kv_lora_rank": kv_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    experts = {"n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    sizes = {"hidden_size": hidden, "num_hidden_layers": 3, "num_attention_heads": heads, "intermediate_size": ffn}
    config = {**sizes, **latent, **experts, "moe_intermediate_size": 4, "q_lora_rank": q_rank, "vocab_size": vocab}
    attention = [(hidden, q_rank), (q_rank, heads * (nope + rope)), (hidden, kv_rank + rope)]
    attention += [(kv_rank, heads * (nope + value)), (heads * value, hidden)]
    dense, moe = [(hidden, ffn)] * 3, [(hidden, 5)] + [(hidden, 4)] * 3 * (2 + 1)
    matrices = attention * 3 + dense + moe * 2
    flops = FlopsModel.from_hf_config(config)
    assert flops.per_token == sum(2 * rows * columns for rows, columns in matrices)
    assert flops.per_pair == 3 * heads * 2 * (nope + rope + value)
    assert flops.per_logit_row == 2 * hidden * vocab
    plain_queries = FlopsModel.from_hf_config(config | {"q_lora_rank": None})
    without = 3 * 2 * (hidden * heads * (nope + rope) - q_rank * (hidden + heads * (nope + rope)))
    assert plain_queries.per_token - flops.per_token == without


def test_flops_count_the_layers_that_have_experts() -> None:
    sizes = {"hidden_size": 6, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 100, "vocab_size": 11}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    dense = FlopsModel.from_hf_config(sizes).per_token
    one_less = 2 * (6 * 8 + 3 * 6 * 2 * 10 - 3 * 6 * 100)
    for change, layers in (({}, 4), ({"decoder_sparse_step": 2}, 2), ({"mlp_only_layers": [0, 3]}, 2)):
        assert FlopsModel.from_hf_config({**sizes, **experts, **change}).per_token == dense + layers * one_less


def test_flops_of_an_incomplete_config_name_the_missing_size() -> None:
    with pytest.raises(ModelError, match="no 'num_attention_heads'"):
        FlopsModel.from_hf_config({"hidden_size": 8})


def test_unit_without_responses_is_refused() -> None:
    with pytest.raises(ValueError, match="a unit has no responses"):
        plan_micro_batches([UnitSize(1, ()), UnitSize(1, (1,))], ranks=1, max_tokens=9, flops=FlopsModel(1, 1, 1))
