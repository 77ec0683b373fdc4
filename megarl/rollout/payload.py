"""Weights as the bytes that SGLang's `update_weights_from_tensor` reads, made without importing SGLang (on a CPU).

The request carries only a handle; the values lie in shared memory (CPU) or are reached over CUDA IPC. Format:
`load_format="flattened_bucket"` of SGLang 0.5.23, one byte tensor and where each weight lies in it.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing

LOAD_FORMAT = "flattened_bucket"
ALIGN_BYTES = 16  # any dtype may be viewed at any weight's start


class Staging:
    """A byte buffer that a bucket is copied into, so that another process can read it; kept from update to update.

    New shared memory costs more than copying into it: every page of it is first cleared by the kernel.

    The caller must not pack a bucket before the engine has confirmed the last one.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def pack(self, bucket: Sequence[tuple[str, torch.Tensor]], copies: int) -> list[str]:
        """Copy `bucket` into the buffer and return one payload per engine rank, base64 text of about 100 bytes per weight.

        The values lie in memory once. The payloads are not interchangeable copies: each holds a reference to the shared
        memory which the rank that opens it gives back, and with the last of them the memory is gone.
        """
        metadata, size = _places(bucket)
        device = bucket[0][1].device
        buffer = self._at_least(size, device)
        for (_, tensor), place in zip(bucket, metadata, strict=True):
            target = buffer[place.start_idx : place.end_idx].view(place.dtype).view(place.shape)
            target.copy_(tensor.detach())
        content = {"flattened_tensor": buffer[:size], "metadata": metadata}
        return [_serialize(content) for _ in range(copies)]

    def _at_least(self, size: int, device: torch.device) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                with _sharing_by_file():
                    self._buffer.share_memory_()
        return self._buffer


def _places(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[SimpleNamespace], int]:
    """Where each weight of `bucket` lies (byte offsets), and the bytes of all; the fields are SGLang's."""
    places, offset = [], 0
    for name, tensor in bucket:
        size = tensor.numel() * tensor.element_size()
        places.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=offset, end_idx=offset + size, numel=size
            )
        )
        offset += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    return places, offset


def _serialize(content: dict[str, Any]) -> str:
    if content["flattened_tensor"].is_cuda:
        # SGLang names CUDA devices by UUID in its own pickles; its serializer is the one that knows how.
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        return str(MultiprocessingSerializer.serialize(content, output_str=True))
    stream = io.BytesIO()
    with _sharing_by_file():
        ForkingPickler(stream).dump(content)
    return base64.b64encode(stream.getvalue()).decode()


@contextlib.contextmanager
def _sharing_by_file() -> Iterator[None]:
    """Tensors shared inside are opened by name, which an unrelated process can do; torch's default needs a common parent."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
