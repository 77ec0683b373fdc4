"""Memory of one process, read by another without its help: by NIXL, over RDMA, or shared memory or TCP where there is none.

A training rank registers the buffers that it stages weights in (`RegisteredMemory`), and a rank of an engine reads what it is
owed (`RemoteReader`). Only these two import NIXL, when one is made. Memory may be on a GPU; that has not been run yet.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.errors import EngineError

POLL_S = 0.0002
"""How often a reader asks whether a transfer is done. Without a pause it would take a core that a sender over TCP may need."""
WINDOWS = 2
"""Buffers of a reader: one is filled while the other's content is copied to its places."""


class Readable(NamedTuple):
    """The address of a registered buffer; plain values, for a process on any machine.

    `metadata` is how NIXL reaches the process that has it, and all that this process has registered. `memory` is NIXL's name
    for the kind, `device` the number that the GPU has in that process (0 for main memory).
    """

    agent: str
    metadata: bytes
    address: int
    memory: str
    device: int


class ByteRange(NamedTuple):
    """Bytes `start` to `stop` of a registered buffer, and where they are put in a window."""

    start: int
    stop: int
    at: int


def load_nixl() -> Any:
    """NIXL's module. Raises EngineError where it cannot be imported."""
    try:
        return import_module("nixl._api")
    except ImportError as error:
        raise EngineError(
            f"rollout.weight_transport is 'rdma', which needs NIXL, and it cannot be imported ({error}): "
            "pip install 'megarl[rdma]' on every machine of the run"
        ) from error


def _errors() -> tuple[type[Exception], ...]:
    """What NIXL raises (classes that have no base of their own), and ConnectionError."""
    members = vars(import_module("nixl._bindings")).values()
    return (ConnectionError, *(kind for kind in members if isinstance(kind, type) and issubclass(kind, Exception)))


def _agent(name: str) -> Any:
    """A NIXL agent without a thread: its own would keep a core busy at all times, whether there is something to do or not."""
    nixl = load_nixl()
    return nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def _place(buffer: Tensor) -> tuple[str, int]:
    """NIXL's name of the kind of memory that `buffer` is in, and its device."""
    return ("VRAM", buffer.get_device()) if buffer.is_cuda else ("DRAM", 0)


class RegisteredMemory:
    """This process's buffers that others read. Its methods may be called by several threads."""

    def __init__(self, name: str) -> None:
        """`name` is for logs; what tells the process from others is made here.

        Raises:
            EngineError: NIXL cannot be imported.
        """
        self._agent = _agent(f"{name}-{uuid.uuid4()}")
        self._lock = threading.Lock()
        self._registered: dict[int, Any] = {}

    def register(self, buffer: Tensor) -> None:
        """Let others read `buffer` (uint8 `[N]`), until `forget`."""
        with self._lock:
            self._registered[buffer.data_ptr()] = self._agent.register_memory(buffer)

    def forget(self, buffer: Tensor) -> None:
        """Nobody may read `buffer` from here on."""
        with self._lock:
            self._agent.deregister_memory(self._registered.pop(buffer.data_ptr()))

    def readable(self, buffer: Tensor) -> Readable:
        """The address of a registered buffer, or of the beginning of one."""
        with self._lock:
            return Readable(self._agent.name, self._agent.get_agent_metadata(), buffer.data_ptr(), *_place(buffer))

    def progress(self) -> None:
        """Answer readers that make their connection, and over TCP that read: to be called again and again while one does."""
        with self._lock:
            self._agent.get_new_notifs()


class RemoteReader:
    """One process's reads from others, into windows that are kept from read to read. For one thread."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the windows are."""
        self._device = device
        self._forget_all()

    def _forget_all(self) -> None:
        """Begin anew: NIXL may still write into windows that a transfer was given up in the middle of."""
        self._agent: Any = None
        self._known: dict[str, bytes] = {}
        self._windows: list[tuple[Tensor, Any] | None] = [None] * WINDOWS

    def read(self, source: Readable, parts: Sequence[Sequence[ByteRange]], timeout_s: float) -> Iterator[Tensor]:
        """Window (uint8 `[N]`) by window, what each of `parts` names; each is good until the next is asked for.

        The next part is under way while the caller has one.

        Raises:
            EngineError: the process is gone, or `timeout_s` seconds have passed since the first part was asked for.
        """
        ends_at = time.monotonic() + timeout_s
        self._agent = self._agent or _agent(f"reader-{uuid.uuid4()}")
        is_whole = False
        try:
            self._meet(source)
            under_way = [self._begin(source, ranges, number) for number, ranges in enumerate(parts[:WINDOWS])]
            for number in range(len(parts)):
                handle, window = under_way[number]
                self._wait(handle, ends_at)
                yield window
                if window.is_cuda:  # until the copies out of it are done
                    torch.cuda.current_stream(window.device).synchronize()
                if number + WINDOWS < len(parts):
                    under_way.append(self._begin(source, parts[number + WINDOWS], number % WINDOWS))
            is_whole = True
        except _errors() as error:
            reason = f"reading weights from {source.agent} failed ({error})"
            raise EngineError(f"{reason}: its process has ended or cannot be reached") from error
        except TimeoutError as error:
            raise EngineError(
                f"reading weights from {source.agent} took more than {timeout_s:g} s (rollout.deadlines.update_s)"
            ) from error
        finally:
            if not is_whole:
                self._forget_all()

    def _meet(self, source: Readable) -> None:
        """Know the process, and what it has registered by now."""
        if self._known.get(source.agent) == source.metadata:
            return
        if self._known.pop(source.agent, None) is not None:  # what it no longer has must not be found at an address used again
            self._agent.remove_remote_agent(source.agent)
        self._agent.add_remote_agent(source.metadata)
        self._known[source.agent] = source.metadata

    def _begin(self, source: Readable, ranges: Sequence[ByteRange], number: int) -> tuple[Any, Tensor]:
        """Begin to read a part into window `number`: the transfer, and what will be in the window."""
        size = max(span.at + span.stop - span.start for span in ranges)
        window = self._window(number, size)
        memory, device = _place(window)
        sizes = [span.stop - span.start for span in ranges]
        local = self._descriptors(memory, window.data_ptr(), [span.at for span in ranges], sizes, device)
        remote = self._descriptors(source.memory, source.address, [span.start for span in ranges], sizes, source.device)
        handle = self._agent.initialize_xfer("READ", local, remote, source.agent)
        self._agent.transfer(handle)
        return handle, window[:size]

    def _descriptors(self, memory: str, address: int, starts: Sequence[int], sizes: Sequence[int], device: int) -> Any:
        """NIXL's list of the bytes of a buffer at `address`."""
        rows = [(address + start, size, device) for start, size in zip(starts, sizes, strict=True)]
        return self._agent.get_xfer_descs(np.array(rows, np.uint64), memory)

    def _window(self, number: int, size: int) -> Tensor:
        registered = self._windows[number]
        if registered is None or len(registered[0]) < size:
            if registered is not None:
                self._agent.deregister_memory(registered[1])
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            if buffer.is_cuda:  # the network card does not wait for what others of this stream still do with that memory
                torch.cuda.current_stream(buffer.device).synchronize()
            registered = self._windows[number] = buffer, self._agent.register_memory(buffer)
        return registered[0]

    def _wait(self, handle: Any, ends_at: float) -> None:
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            if time.monotonic() > ends_at:
                raise TimeoutError
            time.sleep(POLL_S)
        if state != "DONE":
            raise ConnectionError(f"the transfer's state is {state}")
        handle.release()
