"""A buffer on a GPU, opened by another process of the node, and the checksums of tensors on a GPU.

A GPU travels by its UUID: processes may number the GPUs that they see differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.models.weight_tensors import gathered

WORDS_AT_ONCE = 2**22
"""Words of 8 bytes hashed at a time: about ten temporary tensors of 32 MiB, since an engine leaves little of its GPU free."""
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


def checksums(tensors: Sequence[Tensor]) -> list[str]:
    """128 bits for each tensor that depend on every byte of it and on its place, computed where the tensors are.

    Two sums over the words w_i of 8 bytes, modulo 2^64: of odd multiples, by their place, of what maps each word to another
    one. One word that differs always changes both. Small tensors are copied behind each other and summed together: each costs
    a copy, and all together one wait of the host.
    """
    sums: dict[int, Tensor] = {}
    small = [number for number, tensor in enumerate(tensors) if tensor.nbytes < 8 * WORDS_AT_ONCE]
    for group in gathered(small, 8 * WORDS_AT_ONCE, lambda number: tensors[number].nbytes + 8):
        sums |= zip(group, _sums_together([tensors[number] for number in group]), strict=True)
    sums |= {number: _sums_alone(tensor) for number, tensor in enumerate(tensors) if number not in sums}
    if not sums:
        return []
    both = torch.stack([sums[number] for number in range(len(tensors))]).tolist()
    return ["".join(f"{value % 2**64:016x}" for value in of_tensor) for of_tensor in both]


def _sums_together(tensors: Sequence[Tensor]) -> Tensor:
    """The sums of several tensors, `[len(tensors), 2]`."""
    counts = [tensor.nbytes // 8 + 1 for tensor in tensors]  # the last word is filled up with zeros
    words = torch.zeros(sum(counts), dtype=torch.int64, device=tensors[0].device)
    flat, start = words.view(torch.uint8), 0
    for tensor, count in zip(tensors, counts, strict=True):
        flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += 8 * count
    sizes = torch.tensor([counts, [tensor.nbytes for tensor in tensors]]).to(words.device, non_blocking=True)
    ends = sizes[0].cumsum(0)
    begins = (ends - sizes[0]).repeat_interleave(sizes[0], output_size=len(words))
    running = _mixed(words, torch.arange(len(words), device=words.device) - begins).cumsum(1)
    totals = running[:, ends - 1]
    totals[:, 1:] -= running[:, ends[:-1] - 1]
    return (totals + sizes[1]).T


def _sums_alone(tensor: Tensor) -> Tensor:
    """The sums of one tensor, `[2]`, with no more than some of it in further memory."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    rest = len(flat) % 8
    whole = flat[: len(flat) - rest]
    words = (whole if flat.storage_offset() % 8 == 0 else whole.clone()).view(torch.int64)
    last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    last[:rest] = flat[len(flat) - rest :]
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), WORDS_AT_ONCE):
        some = words[start : start + WORDS_AT_ONCE]
        sums += _mixed(some, torch.arange(start, start + len(some), device=some.device)).sum(1)
    sums += _mixed(last.view(torch.int64), torch.full((1,), len(words), device=flat.device)).sum(1)
    return sums + len(flat)


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    """Compute what each word at its place adds to the two sums, `[2, len(words)]`."""
    weights = 2 * places + 1
    mixed = words * _FIRST
    mixed ^= mixed >> 29
    first = mixed * weights
    mixed += places * _PLACE
    mixed *= _SECOND
    mixed ^= mixed >> 32
    mixed *= _FIRST
    return torch.stack([first, mixed * weights])
