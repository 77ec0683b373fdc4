"""A process group of two: a process that sends weights, and one rank of an engine. Both make it, through the sender's store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

SENDER, ENGINE_RANK = 0, 1


class Rendezvous(NamedTuple):
    """How the ranks of an engine reach a sender. A sender that connects anew keeps its name and gets another address."""

    sender: str
    host: str
    port: int
    backend: str
    timeout_s: float

    def store(self, *, is_sender: bool) -> TCPStore:
        """The sender's store, by which the two find each other."""
        timeout = timedelta(seconds=self.timeout_s)
        return TCPStore(self.host, self.port, is_master=is_sender, wait_for_workers=False, timeout=timeout)

    def join(self, store: TCPStore, engine_rank: int, me: int) -> torch.distributed.ProcessGroup:
        """The group with `engine_rank`, as `SENDER` or `ENGINE_RANK`, once the other has come; no default group is needed."""
        name = f"megarl_weights_{self.port}_{engine_rank}"
        group, _ = c10d._new_process_group_helper(
            2,
            me,
            [],
            c10d.Backend(self.backend),
            c10d.PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=timedelta(seconds=self.timeout_s),
        )
        c10d._world.pg_group_ranks[group] = {SENDER: SENDER, ENGINE_RANK: ENGINE_RANK}
        return group


def ready(call: int, engine_rank: int) -> str:
    """The key by which a rank says in the store that it takes what this call announced."""
    return f"ready/{call}/{engine_rank}"


def start_transfer(values: torch.Tensor, group: torch.distributed.ProcessGroup) -> Any:
    """Begin to send (on the sender's side) or receive contiguous `values`, bit by bit; a `torch.distributed.Work`."""
    return torch.distributed.broadcast(values.reshape(-1).view(torch.uint8), src=SENDER, group=group, async_op=True)
