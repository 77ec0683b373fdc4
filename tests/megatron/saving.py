"""A role's checkpoint as a run writes it, without a run: each rank its part, and rank 0 the table of contents."""

from __future__ import annotations

from typing import Any

import torch

from megarl.checkpoint.dist_writer import join_shards, write_shards
from megarl.megatron.shards import Shards, host_memory


def save_role(role: Any, folder: str) -> None:
    """Write the role's checkpoint into `folder`; collective over the world."""
    from megarl.megatron.role_checkpoint import shards_of_role

    write_parts(copied(shards_of_role(role)), folder)


def load_role(role: Any, folder: str) -> None:
    """Read the role's checkpoint from `folder`; collective over the world."""
    from megarl.megatron import role_checkpoint

    role_checkpoint.load_role(role, folder)


def copied(shards: Shards) -> Shards:
    """What is not changed by what the role does next."""
    return shards.copied_into(host_memory(shards.nbytes))


def write_parts(shards: Shards, folder: str) -> None:
    """Write what all ranks' `shards` are the parts of into `folder`; collective over the world."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, write_shards(shards, folder))
    if torch.distributed.get_rank() == 0:
        join_shards(folder, parts)
    torch.distributed.barrier()
