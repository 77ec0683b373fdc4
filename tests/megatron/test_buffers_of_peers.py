"""A role whose ranks read each other's gradients and weights is, bit for bit, one whose ranks send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from tests.families import build_folder
from tests.megatron.moments import everything, role_in, update
from tests.world import World


def trained(rank: int, size: int, layout: Layout, folder: Path, reads: bool) -> tuple[dict[str, Any], list[int], int]:
    """The role after two updates, how many ranks open each buffer's blocks, and messages that this rank was sent."""
    from megarl.megatron import optimizer
    from megarl.platform import gloo, peer_memory

    with pytest.MonkeyPatch.context() as patch:
        for module in (gloo, optimizer):
            patch.setattr(module, "LARGE_BYTES", 0)
        if not reads:
            patch.setattr(peer_memory, "share", lambda tensors: None)
        known = set(peer_memory._BLOCKS)
        role = role_in(layout, folder)
        opened = [len(block.of_ranks) for address, block in peer_memory._BLOCKS.items() if address not in known]
        receive, received = torch.distributed.irecv, []
        patch.setattr(torch.distributed, "irecv", lambda *args, **given: (received.append(1), receive(*args, **given))[1])
        for _ in range(2):
            update(role, rank)
        return everything(role), opened, len(received)


@pytest.mark.parametrize(
    ("family", "layout", "blocks"),
    [
        ("llama", Layout(dp=2), [2, 2]),  # gradients and weights
        pytest.param("mixtral", Layout(dp=4, ep=2), [4, 4, 2, 2], marks=pytest.mark.slow),  # and those of experts
    ],
)
def test_reading_is_sending(world: World, family: str, layout: Layout, blocks: list[int], tmp_path: Path) -> None:
    build_folder(family, tmp_path)
    read, sent = (world.call(trained, layout, tmp_path, reads, size=layout.world_size) for reads in (True, False))
    for (state, opened, received), (expected, of_sending, messages) in zip(read, sent, strict=True):
        assert (opened, of_sending) == (blocks, [])
        assert received < messages  # tokens of experts are always sent
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)


def adding(rank: int, size: int, folder: Path) -> tuple[int, int]:
    """How many parameters an update gives a gradient of their own, and how many add theirs to the buffer themselves."""
    role = role_in(Layout(), folder)
    before: list[bool] = []
    for parameter in (parameter for chunk in role.chunks for parameter in chunk.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda one: before.append(one.grad_added_to_main_grad))
    update(role, rank)
    return before.count(False), before.count(True)


def test_linear_layers_add_their_gradients_to_the_buffer(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path)
    own, added = world.call(adding, tmp_path, size=1)[0]
    assert own
    assert added > own
