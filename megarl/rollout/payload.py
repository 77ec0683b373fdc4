"""Weights as bytes that an SGLang server can read, made without importing SGLang (on a CPU).

A request carries only a handle; the values lie in shared memory (CPU) or are reached over CUDA IPC. Whole weights travel in
SGLang's own format `flattened_bucket`: one byte tensor and where each weight lies in it. Slices, where every tensor-parallel
rank is handed its own, travel in the format that `slice_loader.load` reads inside the server.
"""

from __future__ import annotations

import base64
import contextlib
import io
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

WHOLE = "flattened_bucket"
SLICED = "megarl.rollout.slice_loader.load"
ALIGN_BYTES = 16  # any dtype may be viewed at any weight's start
BUFFERS = 2  # one is filled while the engine reads the other
_STRATEGY = threading.Lock()  # torch's sharing strategy is one for the process


class Place(NamedTuple):
    """Bytes `start:stop` of a buffer are the weight, or the slice of the weight, `name`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The weight, where it lies."""
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


class Staged:
    """A bucket in a buffer that other processes can read: `places[r]` is where the weights of tensor-parallel rank r lie.

    One entry of `places` stands for all ranks: each gets whole weights.
    """

    def __init__(self, buffer: torch.Tensor, places: Sequence[Sequence[Place]]) -> None:
        self.buffer, self.places = buffer, places
        self.readers: list[Future[Any]] = []

    def tensors(self, rank: int = 0) -> list[tuple[str, torch.Tensor]]:
        """What a rank is given, as views of the buffer."""
        return [(place.name, place.view(self.buffer)) for place in self.places[rank]]

    def payloads(self, ranks: int) -> list[str]:
        """One payload per rank of the engine, base64 text of about 100 bytes per weight; the values lie in memory once.

        The payloads are not interchangeable: each holds a reference to the shared memory which the rank that opens it gives
        back, and with the last of them the memory is gone.
        """
        if len(self.places) == 1:
            content = {"flattened_tensor": self.buffer, "metadata": [_for_sglang(place) for place in self.places[0]]}
            return [_serialize(content, self.buffer) for _ in range(ranks)]
        specs = [[(*p[:1], str(p.dtype).removeprefix("torch."), *p[2:]) for p in places] for places in self.places]
        return [_serialize([(spec, self.buffer)], self.buffer) for spec in specs]

    @property
    def load_format(self) -> str:
        """How the server is to read the payloads."""
        return WHOLE if len(self.places) == 1 else SLICED


class Staging:
    """Byte buffers that buckets are copied into in turn, kept from update to update.

    New shared memory costs more than copying into it: every page of it is first cleared by the kernel. A buffer is not
    filled again before everything in its bucket's `readers` is done. `align_bytes` 1 packs weights without gaps.
    """

    def __init__(self, buffers: int = BUFFERS, align_bytes: int = ALIGN_BYTES) -> None:
        self._align_bytes = align_bytes
        self._buffers: list[torch.Tensor | None] = [None] * buffers
        self._staged: list[Staged | None] = [None] * buffers
        self._next = 0

    @property
    def bytes(self) -> int:
        """Memory that the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def stage(self, bucket: Sequence[tuple[str, Sequence[torch.Tensor]]]) -> Staged:
        """Copy the weights `(name, one tensor for all ranks or one for each)` into the next buffer.

        Ranks that are given the same tensor object share its place.
        """
        number, self._next = self._next, (self._next + 1) % len(self._buffers)
        before = self._staged[number]
        if before is not None:
            for reader in before.readers:
                reader.exception()  # waits; a failure is its owner's to report
        places, size = _places(bucket, self._align_bytes)
        buffer = self._at_least(number, size, bucket[0][1][0].device)[:size]
        for (_, tensors), *of_ranks in zip(bucket, *places, strict=True):
            for place, tensor in dict(zip(of_ranks, tensors, strict=True)).items():
                place.view(buffer).copy_(tensor.detach())
        staged = self._staged[number] = Staged(buffer, places)
        return staged

    def _at_least(self, number: int, size: int, device: torch.device) -> torch.Tensor:
        buffer = self._buffers[number]
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = self._buffers[number] = torch.empty(size, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                with sharing_by_file():
                    buffer.share_memory_()
        return buffer


def _places(bucket: Sequence[tuple[str, Sequence[torch.Tensor]]], align_bytes: int) -> tuple[list[list[Place]], int]:
    """Per rank the places of `bucket`'s weights, and the bytes of all."""
    ranks: list[list[Place]] = [[] for _ in bucket[0][1]]
    offset = end = 0
    for name, tensors in bucket:
        known: dict[int, Place] = {}
        for rank, tensor in enumerate(tensors):
            if id(tensor) not in known:
                end = offset + tensor.numel() * tensor.element_size()
                known[id(tensor)] = Place(name, tensor.dtype, tuple(tensor.shape), offset, end)
                offset = -(-end // align_bytes) * align_bytes
            ranks[rank].append(known[id(tensor)])
    return ranks, end


def _for_sglang(place: Place) -> SimpleNamespace:
    """A place in SGLang's fields, of which `numel` is bytes, too."""
    return SimpleNamespace(
        name=place.name,
        shape=torch.Size(place.shape),
        dtype=place.dtype,
        start_idx=place.start,
        end_idx=place.stop,
        numel=place.stop - place.start,
    )


def _serialize(content: Any, buffer: torch.Tensor) -> str:
    if buffer.is_cuda:
        # SGLang names CUDA devices by UUID in its own pickles; its serializer is the one that knows how.
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        return str(MultiprocessingSerializer.serialize(content, output_str=True))
    stream = io.BytesIO()
    with sharing_by_file():
        ForkingPickler(stream).dump(content)
    return base64.b64encode(stream.getvalue()).decode()


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
