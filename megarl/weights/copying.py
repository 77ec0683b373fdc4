"""Copies of tensors, with their checksums, as fast as a CPU's memory allows; on a GPU torch's own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from megarl.weights.checksums import RunningDigest

BLOCK_BYTES = 256 * 2**10  # copied and hashed at a time: it stays in a core's own cache
FEW_BYTES = 4 * 2**20
"""Less than this a thread has done before others have begun."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that NumPy has, by their bytes


def copy(to: torch.Tensor, values: torch.Tensor) -> None:
    """`to.copy_(values)` of one dtype, on a CPU with one thread: for each small tensor torch's would wait for one another."""
    if to.is_cuda:
        to.copy_(values)
        return
    np.copyto(_bits(to), _bits(values))


def copy_hashed(to: torch.Tensor, values: torch.Tensor) -> str:
    """Copy, as `copy` on a CPU, with the checksum of what was copied: of each block while it is in the cache, which
    costs little."""
    target, source = _bits(to), _bits(values)
    rows = max(1, BLOCK_BYTES * len(target) // max(1, target.nbytes))
    running = RunningDigest()
    for first in range(0, len(target), rows):
        block = target[first : first + rows]
        np.copyto(block, source[first : first + rows])
        running.update(block.data)
    return running.hexdigest()


def in_threads(action: Callable[[int], None], tensors: Sequence[torch.Tensor]) -> None:
    """Call `action` with the number of each of the tensors, on a CPU in as many threads as there are cores."""
    # none waits for a large one at the end; on a GPU the kernels of one stream follow each other anyway
    numbers = deque(sorted(range(len(tensors)), key=lambda number: -tensors[number].nbytes))

    def work() -> None:
        while numbers:
            try:
                number = numbers.popleft()
            except IndexError:  # another thread took the last one
                return
            action(number)

    few = any(tensor.is_cuda for tensor in tensors) or sum(tensor.nbytes for tensor in tensors) < FEW_BYTES
    count = 1 if few else min(len(tensors), len(os.sched_getaffinity(0)))
    if count < 2:
        work()
        return
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(work) for _ in range(count)]:
            done.result()


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """A view of a CPU's tensor in a dtype that NumPy has."""
    return tensor.view(_BITS[tensor.element_size()]).numpy()
