"""Ranks on one machine read each other's gradients and weights where they lie, and get what sending them gives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import distributed

from megarl.platform import peer_memory
from megarl.platform.gloo import LARGE_BYTES, all_gather_by_pairs, reduce_scatter_by_pairs
from tests.world import World

OF_SHARD = LARGE_BYTES // 2 + 3


class Owner:
    """What memory belongs to."""


def never(*args: Any, **kwargs: Any) -> Any:
    """Gloo's own collective, which is not to be called."""
    raise AssertionError("left to Gloo")


def whole(rank: int, size: int) -> torch.Tensor:
    """What a rank has at first, as a part of a larger block."""
    values = torch.randn(7 + size * OF_SHARD, generator=torch.Generator().manual_seed(rank))
    return values[7:]


def exchanged(rank: int, size: int, opened: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """This rank's shard of the sum, its tensor when all have gathered their shards of it, and messages that it was sent."""
    group, owner, mine = distributed.group.WORLD, Owner(), whole(rank, size)
    received, receive = [], distributed.irecv
    if opened:
        assert peer_memory.open_to_peers(mine, group, owner)
    shard = mine.view(size, -1)[rank]
    distributed.irecv = lambda *args, **kwargs: (received.append(1), receive(*args, **kwargs))[1]
    try:
        reduce_scatter_by_pairs(never)(shard, mine, group=group)
        total = shard.clone()
        all_gather_by_pairs(never)(mine, shard, group=group)
    finally:
        distributed.irecv = receive
    return total, mine, len(received)


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_read_is_what_is_sent(world: World, size: int) -> None:
    sent, read = (world.call(exchanged, opened, size=size) for opened in (False, True))
    for rank, ((total, after, _), (expected, expected_after, messages)) in enumerate(zip(read, sent, strict=True)):
        assert torch.equal(total, expected)
        assert torch.equal(after, expected_after)
        assert torch.equal(after.view(size, -1)[rank], total)
        assert messages
    assert [messages for *_, messages in read] == [0] * size
    assert not torch.equal(read[0][1].view(size, -1)[1], whole(0, size).view(size, -1)[1])


def forgotten(rank: int, size: int) -> tuple[int, int]:
    """How many blocks are known while their owner lives, and afterwards."""
    gc.collect()
    before, owner = len(peer_memory._BLOCKS), Owner()
    assert peer_memory.open_to_peers(whole(rank, size), distributed.group.WORLD, owner)
    during = len(peer_memory._BLOCKS) - before
    del owner
    return during, len(peer_memory._BLOCKS) - before


def test_memory_is_kept_as_long_as_its_owner(world: World) -> None:
    assert world.call(forgotten, size=2) == [(1, 0)] * 2


def refused(rank: int, size: int, why: str) -> tuple[bool, bool]:
    """Whether memory was opened that one rank cannot open, and whether it would be read."""
    group, mine, owner = distributed.group.WORLD, whole(rank, size), Owner()
    share, load = peer_memory.share, peer_memory.pickle.loads
    if rank == 1 and why == "no room":
        peer_memory.share = lambda tensors: None
    if rank == 1 and why == "no such file":

        def no_file(data: bytes) -> Any:
            raise RuntimeError("unable to open shared memory object </torch_1_2_3>: No such file or directory")

        peer_memory.pickle.loads = no_file
    try:
        opened = peer_memory.open_to_peers(mine, group, owner)
    finally:
        peer_memory.share, peer_memory.pickle.loads = share, load
    return opened, peer_memory.of_peers(mine, group) is not None


@pytest.mark.parametrize("why", ["no room", "no such file"])
def test_all_send_where_one_cannot_read(world: World, why: str) -> None:
    assert world.call(refused, why, size=2) == [(False, False)] * 2


def test_another_group_is_sent(world: World) -> None:
    assert world.call(of_another_group, size=2) == [True] * 2


def of_another_group(rank: int, size: int) -> bool:
    owner, mine = Owner(), whole(rank, size)
    assert peer_memory.open_to_peers(mine, distributed.group.WORLD, owner)
    return peer_memory.of_peers(mine, distributed.new_group([0, 1])) is None
