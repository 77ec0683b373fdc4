"""The process groups of one engine: all training ranks that send to it, then the engine's own ranks. Anew for each connection.

Every engine has as few as can be, however many ranks send to it: under NCCL a group takes GPU memory and about a second to
make. Members find each other through the store that the engine's owner keeps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

CONNECTIONS = {"gloo": 2, "nccl": 1}
"""By backend how many groups the members make. One of Gloo's is a connection with a thread on either side that moves its bytes;
NCCL has as many as are worth it in one group.
"""
POLL_S = 0.001
"""How often it is asked what has arrived on a GPU."""


Groups = list[torch.distributed.ProcessGroup]


class EngineGroup(NamedTuple):
    """Values that every member needs to join. Senders have the numbers from 0 on, the engine's ranks those after them.

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

    def join(self, store: TCPStore, member: int, device: torch.device | None) -> Groups:
        """The groups, once all members have come; no default group is needed. `device` is where the member's weights are.

        On a GPU the communicator is made at once and for all members. Else torch would make one for each pair that talks.
        """
        return [self._joined(store, member, device, number) for number in range(CONNECTIONS[self.backend])]

    def _joined(self, store: TCPStore, member: int, device: torch.device | None, number: int) -> torch.distributed.ProcessGroup:
        name = f"megarl_weights_{self.port}_{self.name}_{number}"
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


def leave(groups: Groups) -> None:
    """Give the groups up on this side."""
    for group in groups:
        torch.distributed.destroy_process_group(group)


class Turns:
    """Over which group each message of a call goes from one member to another; both ask about the same ones, in order."""

    def __init__(self, groups: Groups) -> None:
        self._groups, self._nbytes = groups, [0] * len(groups)

    def group_for(self, nbytes: int) -> torch.distributed.ProcessGroup:
        """Choose the group that was given the fewest bytes before this message, of which it is given these."""
        number = min(range(len(self._groups)), key=self._nbytes.__getitem__)
        self._nbytes[number] += nbytes
        return self._groups[number]


STEPS = 8
"""Of a call, in each of which every member has an even part of what it sends to each other one. With more steps members wait
longer for one another where there are few messages; with fewer, more bytes are under way that had to be copied.
"""


def steps_of(nbytes: Sequence[int]) -> list[int]:
    """The step of each message between two members, by the bytes before it."""
    ends, total = accumulate(nbytes), max(1, sum(nbytes))
    return [min(STEPS - 1, STEPS * (2 * end - size) // (2 * total)) for end, size in zip(ends, nbytes, strict=True)]


class OnTheWay:
    """Contiguous `values` between two members, bit by bit; `work` is torch's."""

    def __init__(self, values: torch.Tensor, work: Any) -> None:
        self.nbytes = values.nbytes
        self.values, self.work = values, work  # kept until they have arrived

    def wait(self) -> None:
        """Return when the member has the values; raises RuntimeError if the connection broke."""
        if not self.values.is_cuda:
            self.work.wait()
            return
        while not self.work.is_completed():  # to wait for it would only have later kernels wait
            time.sleep(POLL_S)


def start_sending(values: torch.Tensor, group: torch.distributed.ProcessGroup, member: int) -> OnTheWay:
    """Begin to send."""
    return OnTheWay(values, group.send([_bits(values)], member, 0))


def start_receiving(values: torch.Tensor, group: torch.distributed.ProcessGroup, member: int) -> OnTheWay:
    """Begin to receive."""
    return OnTheWay(values, group.recv([_bits(values)], member, 0))


@contextlib.contextmanager
def together(groups: Groups, device: torch.device | None) -> Iterator[list[OnTheWay]]:
    """Begin what is added to the list inside at once: else NCCL takes one message of a group after the other.

    Members that have the same steps in the same order do not wait for each other in a circle.
    """
    begun: list[OnTheWay] = []
    if device is None or device.type != "cuda":
        yield begun
        return
    [group] = groups
    group._start_coalescing(device)
    yield begun
    work = group._end_coalescing(device)
    for one in begun:
        one.work = work


def in_a_thread(action: Callable[[], object]) -> Future[None]:
    """Run an action in a thread that does not keep the process alive."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return done


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)
