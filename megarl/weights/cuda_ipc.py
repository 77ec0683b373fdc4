"""A buffer on a GPU, opened by another process of the node, and the checksum of a tensor on a GPU.

A GPU travels by its UUID: processes may number the GPUs that they see differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WORDS_AT_ONCE = 2**24
"""Words of 8 bytes hashed at a time: some temporary tensors of 128 MiB."""
_FIRST, _SECOND, _PLACE = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x5851F42D4C957F2D  # odd: products with them lose no bit


def shared(buffer: Tensor) -> tuple[Any, ...]:
    """Plain values with which another process opens `buffer` (uint8 `[N]`) once: plain values.

    The memory stays until every process that was given such values has opened the buffer and let go of it.
    """
    gpu, *handle = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return (str(torch.cuda.get_device_properties(gpu).uuid), *handle, buffer.storage_offset(), buffer.numel())


def opened(values: Sequence[Any]) -> Tensor:
    """The buffer that `shared` gave these values for; the current stream waits for what was queued before on the sender's.

    Raises:
        ValueError: this process does not see the buffer's GPU.
    """
    uuid, *handle, start, count = values
    seen = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ValueError(f"the weights are on GPU {uuid}, which this process does not see; it sees {', '.join(seen)}")
    storage = torch.UntypedStorage._new_shared_cuda(seen.index(uuid), *handle)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (count,), (1,))


def checksum(tensor: Tensor) -> str:
    """128 bits that depend on every byte of a contiguous tensor and on its place, computed where the tensor is.

    Two sums over the words w_i of 8 bytes, modulo 2^64: of odd multiples, by their place, of what maps each word to another
    one. One word that differs always changes both.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    rest = len(flat) % 8
    whole = flat[: len(flat) - rest]
    words = (whole if flat.storage_offset() % 8 == 0 else whole.clone()).view(torch.int64)
    last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    last[:rest] = flat[len(flat) - rest :]
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), WORDS_AT_ONCE):
        sums += _sums(words[start : start + WORDS_AT_ONCE], start)
    sums += _sums(last.view(torch.int64), len(words))
    sums += len(flat)
    return "".join(f"{value % 2**64:016x}" for value in sums.tolist())


def _sums(words: Tensor, start: int) -> Tensor:
    places = torch.arange(start, start + len(words), device=words.device)
    mixed = words * _FIRST
    mixed ^= mixed >> 29
    first = (mixed * (2 * places + 1)).sum()
    mixed += places * _PLACE
    mixed *= _SECOND
    mixed ^= mixed >> 32
    mixed *= _FIRST
    return torch.stack([first, (mixed * (2 * places + 1)).sum()])
