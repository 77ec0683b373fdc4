"""Batched decoding attention against the definition, request by request in float64."""

from __future__ import annotations

import pytest
import torch

from megarl.rollout.engines.sglang.on_cpu.batched_attention import attend, attend_with_sinks, gathers


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3)])
def test_batched_attention_is_that_of_each_request_alone(heads: int, kv_heads: int) -> None:
    """Lengths from 1 to 40 in a paged cache whose other slots hold values that would spoil every sum."""
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 3, 7, 8, 9, 40, 33])
    batch, dim, value_dim, slots = len(lengths), 16, 8, 400
    query = torch.randn(batch, heads, dim)
    keys, values = torch.full((slots, kv_heads, dim), 30.0), torch.full((slots, kv_heads, value_dim), 1e4)
    table = torch.randint(0, slots, (20, 64), dtype=torch.int32)  # beyond a request's length: slots of others
    request_rows = torch.randperm(20)[:batch]
    free = torch.randperm(slots - 1) + 1
    for request, length in zip(request_rows.tolist(), lengths.tolist(), strict=True):
        own, free = free[:length], free[length:]
        table[request, :length] = own.int()
        keys[own], values[own] = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, value_dim)

    result = attend(query, keys, values, gathers(table, request_rows, lengths), scale=0.3)

    for i, (request, length) in enumerate(zip(request_rows.tolist(), lengths.tolist(), strict=True)):
        own = table[request, :length].long()
        for head in range(heads):
            shared = head * kv_heads // heads
            weights = (keys[own, shared].double() @ query[i, head].double() * 0.3).softmax(0)
            expected = weights @ values[own, shared].double()
            assert (result[i, head].double() - expected).abs().max() < 1e-5


def test_requests_are_padded_to_less_than_twice_their_length() -> None:
    lengths = torch.tensor([1, 100, 60, 3, 2, 64, 127])
    groups = gathers(torch.zeros(7, 128, dtype=torch.int32), torch.arange(7), lengths)
    assert sorted(row for group in groups for row in group.rows.tolist()) == list(range(7))
    for group in groups:
        assert group.slots.shape[1] < 2 * int(lengths[group.rows].min())


@pytest.mark.parametrize(("new", "window"), [(1, None), (9, None), (1, 4), (9, 4)])
def test_attention_with_sinks_has_one_more_key_whose_value_is_zero(new: int, window: int | None) -> None:
    torch.manual_seed(1)
    length, heads, kv_heads, dim = 9, 6, 2, 8
    query, sinks = torch.randn(new, heads, dim), torch.randn(heads)
    keys, values = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, 5)

    result = attend_with_sinks(query, keys, values, sinks, 0.3, window)

    for token in range(new):
        at = length - new + token
        seen = range(0 if window is None else max(0, at - window), at + 1)
        for head in range(heads):
            scores = [0.3 * float(query[token, head].double() @ keys[key, head // 3].double()) for key in seen]
            weights = torch.tensor([*scores, float(sinks[head])], dtype=torch.float64).softmax(0)
            expected = sum(weight * values[key, head // 3].double() for weight, key in zip(weights, seen, strict=False))
            assert (result[token, head].double() - expected).abs().max() < 1e-6
