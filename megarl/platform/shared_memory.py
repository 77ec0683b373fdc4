"""Memory of a CPU's tensors that other processes on the machine open by name."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterable, Iterator

import torch
import torch.multiprocessing

SHARED_MEMORY = "/dev/shm"
_STRATEGY = threading.Lock()  # torch's sharing strategy is one for the process


def share(tensors: Iterable[torch.Tensor]) -> None:
    """Put the memory behind tensors of a CPU where processes on this machine can open it, if half of what is free there is
    enough. All views of it stay what they are."""
    blocks = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == "cpu" and not tensor.is_shared()
    }
    if sum(block.nbytes() for block in blocks.values()) > shutil.disk_usage(SHARED_MEMORY).free // 2:
        return
    with sharing_by_file():
        for block in blocks.values():
            block.share_memory_()


@contextlib.contextmanager
def sharing_by_file() -> Iterator[None]:
    """Tensors shared inside are opened by name, which an unrelated process can do; torch's default needs a common parent."""
    with _STRATEGY:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
