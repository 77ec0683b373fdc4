"""The harness that the distributed tests stand on: values come back in order, failures say whose and where."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from megarl.config.layout import Layout
from tests.planning.ranks import held
from tests.planning.test_memory import COMMON, MODELS, SP
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


def _threads_of_groups(rank: int, world_size: int) -> int:
    names = (Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task"))
    return sum("gloo_run" in name for name in names)


def test_groups_of_a_model_with_experts_end_with_it(world: World) -> None:
    """Each has a thread that wakes ten times a second; a session's ranks had thousands."""
    sizes = (Layout(**SP), COMMON | MODELS["qwen3_moe"], {}, 64, 32, 1)
    before = world.call(_threads_of_groups, size=2)
    for _ in range(3):
        world.call(held, *sizes, size=2)
    after = world.call(_threads_of_groups, size=2)
    assert max(late - early for early, late in zip(before, after, strict=True)) <= 3 * 3  # 100 if its groups stay


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
