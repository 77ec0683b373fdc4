"""The harness that the distributed tests stand on: values come back in order, failures say whose and where."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

from tests.world import World, WorldFailure


def _sum_of_ranks(rank: int, world_size: int, scale: float) -> torch.Tensor:
    total = torch.tensor(rank * scale)
    torch.distributed.all_reduce(total)
    return total + rank


def _fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one's own words")
    torch.distributed.barrier()


def _sleep_on_rank_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(60)


def _what_is_imported(rank: int, world_size: int) -> bool:
    return "megarl.megatron.rank_model" in sys.modules


def _die(rank: int, world_size: int) -> None:
    os._exit(7)


def test_a_call_returns_each_ranks_value_in_order(world: World) -> None:
    assert [value.item() for value in world.call(_sum_of_ranks, 10.0, size=3)] == [30.0, 31.0, 32.0]


def test_ranks_start_with_what_they_all_import(world: World) -> None:
    """A preloaded module that cannot be imported is passed over in silence, and each rank would import everything again."""
    assert world.call(_what_is_imported) == [True] * 4


def test_a_smaller_world_sees_its_own_size(world: World) -> None:
    assert [value.item() for value in world.call(_sum_of_ranks, 10.0, size=2)] == [10.0, 11.0]


@pytest.mark.slow
def test_failures_name_the_rank_and_leave_a_usable_world() -> None:
    with World(2) as world:
        with pytest.raises(WorldFailure, match=r"rank 1: Traceback[\s\S]*rank one's own words"):
            world.call(_fail_on_rank_one)
        with pytest.raises(WorldFailure, match=r"rank 0 did not answer[\s\S]*_sleep_on_rank_zero"):
            world.call(_sleep_on_rank_zero, timeout_s=3.0)
        with pytest.raises(WorldFailure, match="exit code 7"):
            world.call(_die)
        assert [value.item() for value in world.call(_sum_of_ranks, 1.0)] == [1.0, 2.0]
