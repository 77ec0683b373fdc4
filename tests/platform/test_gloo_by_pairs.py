"""Large reductions and gathers go between pairs of ranks, and give what Gloo's own collectives give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from megarl.platform import gloo
from tests.world import World

PARTS = gloo.PART_ELEMENTS


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(rank: int, size: int, of_shard: int, dtype: torch.dtype, in_place: bool, coalesced: bool) -> tuple[Any, Any, Any]:
    """(this rank's shard of the sum; the expected one in float64; whether the other shards stayed as they were)."""
    mine = values(rank, size * of_shard, dtype)
    before = mine.clone()
    output = mine.view(size, -1)[rank] if in_place else torch.full((of_shard,), torch.nan, dtype=dtype)
    if coalesced:  # as megatron-core's buffer of gradients asks
        with distributed.distributed_c10d._coalescing_manager(distributed.group.WORLD):
            distributed.reduce_scatter_tensor(output, mine, op=distributed.ReduceOp.SUM, group=distributed.group.WORLD)
    else:
        distributed.reduce_scatter_tensor(output, mine)
    shard = slice(rank * of_shard, (rank + 1) * of_shard)
    expected = sum(values(other, size * of_shard, dtype)[shard].double() for other in range(size))
    rest = [other for other in range(size) if other != rank or not in_place]
    return output, expected, torch.equal(mine.view(size, -1)[rest], before.view(size, -1)[rest])


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("size", "of_shard", "dtype"),
    [
        (2, PARTS // 2, torch.float32),
        (2, 2 * PARTS + 17, torch.float32),
        (3, PARTS + 1, torch.float32),
        (4, PARTS, torch.bfloat16),
    ],
)
def test_every_rank_has_the_sum_of_its_shard(
    world: World, size: int, of_shard: int, dtype: torch.dtype, in_place: bool, coalesced: bool
) -> None:
    for got, expected, rest_is_as_before in world.call(reduced, of_shard, dtype, in_place, coalesced, size=size):
        scale = expected.abs().max()
        assert (got.double() - expected).abs().max() <= size * torch.finfo(dtype).eps * scale
        assert rest_is_as_before


def gathered(rank: int, size: int, of_shard: int, in_place: bool) -> bool:
    whole = torch.full((size * of_shard,), torch.nan)
    mine = whole.view(size, -1)[rank] if in_place else torch.empty(of_shard)
    mine.copy_(values(rank, of_shard, torch.float32))
    distributed.all_gather_into_tensor(whole.view(size, of_shard), mine)
    return torch.equal(whole, torch.cat([values(other, of_shard, torch.float32) for other in range(size)]))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("size", "of_shard"), [(2, PARTS), (3, 100_003)])
def test_every_rank_has_all_shards(world: World, size: int, of_shard: int, in_place: bool) -> None:
    assert world.call(gathered, of_shard, in_place, size=size) == [True] * size


def used_collectives(rank: int, size: int) -> list[str]:
    """What of some calls is left to Gloo's own collectives."""
    own: list[str] = []

    def noting(name: str) -> Any:
        return lambda *args, **kwargs: own.append(name)

    reduce_scatter, all_gather = gloo.reduce_scatter_by_pairs(noting("reduce")), gloo.all_gather_by_pairs(noting("gather"))
    large, small = torch.ones(size * PARTS), torch.ones(size * 8)
    reduce_scatter(large[:PARTS], large)
    all_gather(large, large[:PARTS].clone())
    assert own == []
    reduce_scatter(small[:8], small)
    reduce_scatter(large[:PARTS], large, op=distributed.ReduceOp.AVG)
    reduce_scatter(large[:PARTS], large, async_op=True)
    all_gather(small, small[:8])
    all_gather(large, large[:PARTS], async_op=True)
    all_gather(large.view(-1, size).T, large[:PARTS])
    return own


def test_all_else_is_left_to_gloo(world: World) -> None:
    assert world.call(used_collectives, size=2) == [["reduce"] * 3 + ["gather"] * 3] * 2
