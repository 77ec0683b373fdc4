"""Writing in the background: what a rank contributes to checkpoints, while it trains on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from megarl.checkpoint.dist_writer import Written, write_shards
from megarl.megatron.host_memory import HostMemory
from megarl.megatron.shards import Shards, host_memory
from megarl.system.threads import step_back


class BackgroundWriter:
    """A thread that writes one role's part after the other and leaves the processor to whoever else wants it.

    The memory that a role is copied into is kept: getting it anew costs several times what the copy does.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=step_back)
        self._writing: dict[str, Future[Written]] = {}
        self._memory: dict[str, HostMemory] = {}

    def begin(self, role: str, shards: Shards, folder: str) -> None:
        """Copy `shards` and start to write the copy; on return, training may go on."""
        if role in self._writing:
            self._writing[role].exception()  # waits: the one before needs the memory, if its checkpoint was given up
        memory = self._memory.get(role)
        if memory is None or memory.nbytes < shards.nbytes:
            memory = self._memory[role] = host_memory(shards.nbytes)
        self._writing[role] = self._pool.submit(write_shards, shards.copied_into(memory), folder)

    def result(self, role: str, *, wait: bool) -> Written | None:
        """The files of the write that was begun last, durable by now; None if it is not yet there and `wait` is not asked for.

        Raises:
            CheckpointError: it could not be written.
        """
        writing = self._writing[role]
        return writing.result() if wait or writing.done() else None
