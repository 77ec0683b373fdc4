"""Writing in the background: what a rank contributes to checkpoints, while it trains on."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from megarl.checkpoint.dist_writer import Written, write_shards

if TYPE_CHECKING:
    from megarl.megatron.shards import Shards

_NICENESS = 10


class BackgroundWriter:
    """A thread that writes one role's part after the other and leaves the processor to whoever else wants it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=_step_back)
        self._writing: dict[str, Future[Written]] = {}

    def begin(self, role: str, shards: Shards, folder: str) -> None:
        """Start to write `shards`, which nobody may change any more."""
        self._writing[role] = self._pool.submit(write_shards, shards, folder)

    def result(self, role: str, *, wait: bool) -> Written | None:
        """What was written of what was begun last, durable by now; None if it is not yet there and `wait` is not asked for.

        Raises:
            CheckpointError: it could not be written.
        """
        writing = self._writing[role]
        return writing.result() if wait or writing.done() else None


def _step_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux, of this thread alone
