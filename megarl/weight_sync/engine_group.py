"""The process group of one engine: all training ranks that send to it, then the engine's own ranks. One for each connection.

Every engine has one, however many ranks send to it: under NCCL a group takes GPU memory and about a second to make. Members
find each other through the store that the engine's owner keeps.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

POLL_S = 0.001
"""How often it is asked what has arrived on a GPU."""


class EngineGroup(NamedTuple):
    """What every member needs to join. Senders have the numbers from 0 on, the engine's ranks those after them.

    `name` is unlike that of any other connection over the same store.
    """

    name: str
    host: str
    port: int
    senders: int
    ranks: int
    backend: str
    timeout_s: float

    def store(self) -> TCPStore:
        """The engine's store."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s))

    def join(self, store: TCPStore, member: int, device: torch.device | None) -> torch.distributed.ProcessGroup:
        """The group, once all members have come; no default group is needed. `device` is where the member's weights are.

        On a GPU the communicator is made at once and for all members. Else torch would make one for each pair that talks.
        """
        name = f"megarl_weights_{self.port}_{self.name}"
        group, _ = c10d._new_process_group_helper(
            self.senders + self.ranks,
            member,
            [],
            c10d.Backend(self.backend),
            c10d.PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=timedelta(seconds=self.timeout_s),
            device_id=device if device is not None and device.type == "cuda" else None,
        )
        c10d._world.pg_group_ranks[group] = {number: number for number in range(self.senders + self.ranks)}
        return group

    def joining(self, engine_rank: int) -> str:
        """The key by which a rank of the engine says in the store that it is about to join."""
        return f"{self.name}/joining/{engine_rank}"

    @property
    def failed(self) -> str:
        """The key by which the first sender tells the others why the engine does not join."""
        return f"{self.name}/failed"

    def ready(self, sender: int, call: int, engine_rank: int) -> str:
        """The key by which a rank of the engine says in the store that it takes what this call announced."""
        return f"{self.name}/ready/{sender}/{call}/{engine_rank}"


def leave(group: torch.distributed.ProcessGroup) -> None:
    """Give the group up on this side."""
    torch.distributed.destroy_process_group(group)


class Sending:
    """Contiguous `values` on their way to a member, bit by bit."""

    def __init__(self, values: torch.Tensor, group: torch.distributed.ProcessGroup, member: int) -> None:
        self.nbytes = values.nbytes
        self._values = values  # kept until they have arrived
        self._work = group.send([_bits(values)], member, 0)

    def wait(self) -> None:
        """Return when the member has the values; raises RuntimeError if the connection broke."""
        if not self._values.is_cuda:
            self._work.wait()
            return
        while not self._work.is_completed():  # to wait for it would only have later kernels wait
            time.sleep(POLL_S)


def start_receiving(values: torch.Tensor, group: torch.distributed.ProcessGroup, member: int) -> Any:
    """Begin to receive contiguous `values` bit by bit; a `torch.distributed.Work`."""
    return group.recv([_bits(values)], member, 0)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)
