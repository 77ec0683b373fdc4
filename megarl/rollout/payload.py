"""Weights as bytes that an SGLang server can read, made without importing SGLang (on a CPU).

A request carries only a handle; the values lie in shared memory (CPU) or are reached over CUDA IPC, in the format that
`slice_loader.load` reads inside the server: where in the bytes each piece lies, and where in a parameter it belongs.
"""

from __future__ import annotations

import base64
import contextlib
import io
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

from megarl.reshard.pieces import Held, Piece
from megarl.reshard.targets import EVERY_RANK

SLICED = "megarl.rollout.slice_loader.load"
ALIGN_BYTES = 16  # any dtype may be viewed at any weight's start
BUFFERS = 2  # one is filled while the engine reads the other
_STRATEGY = threading.Lock()  # torch's sharing strategy is one for the process


class Place(NamedTuple):
    """Bytes `start:stop` of a buffer are what an engine is to hold as `held`."""

    held: Held
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The values, where they lie."""
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


class Staged:
    """Pieces in a buffer that other processes can read. `name` is the buffer's: another under this name has replaced it."""

    def __init__(self, buffer: torch.Tensor, places: Sequence[Place], name: str) -> None:
        self.buffer, self.places, self.name = buffer, places, name
        self.readers: list[Future[Any]] = []

    def only(self, places: Sequence[Place]) -> Staged:
        """The same buffer, of which only these places are to be read."""
        return Staged(self.buffer, places, self.name)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Names and values, as views of the buffer."""
        return [(place.held.tensor, place.view(self.buffer)) for place in self.places]

    def payloads(self, ranks: int) -> list[str]:
        """One payload per rank of the engine, base64 text of about 100 bytes per piece; the values lie in memory once.

        The payloads are not interchangeable: each holds a reference to the shared memory which the rank that opens it gives
        back, and with the last of them the memory is gone.
        """
        of_ranks: list[list[tuple[Any, ...]]] = [[] for _ in range(ranks)]
        for held, dtype, _, start, stop in self.places:
            spec = (*held, str(dtype).removeprefix("torch."), start, stop)
            for rank in range(ranks) if held.engine_rank == EVERY_RANK else (held.engine_rank,):
                of_ranks[rank].append(spec)
        return [serialize([((self.name, specs), self.buffer)], self.buffer.is_cuda) for specs in of_ranks]


class Staging:
    """Byte buffers that buckets are copied into in turn, kept from update to update.

    New shared memory costs more than copying into it: every page of it is first cleared by the kernel. A buffer is not
    filled again before everything in its bucket's `readers` is done. `align_bytes` 1 packs weights without gaps.
    """

    def __init__(self, buffers: int = BUFFERS, align_bytes: int = ALIGN_BYTES, name: str = "") -> None:
        self._align_bytes, self._name = align_bytes, name
        self._buffers: list[torch.Tensor | None] = [None] * buffers
        self._staged: list[Staged | None] = [None] * buffers
        self._next = 0

    @property
    def bytes(self) -> int:
        """Memory that the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def stage(self, pieces: Sequence[Piece]) -> Staged:
        """Copy `pieces` into the next buffer."""
        number, self._next = self._next, (self._next + 1) % len(self._buffers)
        before = self._staged[number]
        if before is not None:
            for reader in before.readers:
                reader.exception()  # waits; a failure is its owner's to report
        places, size = _places(pieces, self._align_bytes)
        buffer = self._at_least(number, size, pieces[0].tensor.device)[:size]
        for place, piece in zip(places, pieces, strict=True):
            place.view(buffer).copy_(piece.tensor.detach())
        staged = self._staged[number] = Staged(buffer, places, f"{self._name}/{number}")
        return staged

    def _at_least(self, number: int, size: int, device: torch.device) -> torch.Tensor:
        buffer = self._buffers[number]
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = self._buffers[number] = torch.empty(size, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                with sharing_by_file():
                    buffer.share_memory_()
        return buffer


def _places(pieces: Sequence[Piece], align_bytes: int) -> tuple[list[Place], int]:
    """The places of `pieces`, and the bytes of all."""
    places: list[Place] = []
    end = 0
    for held, tensor in pieces:
        start = -(-end // align_bytes) * align_bytes
        end = start + tensor.numel() * tensor.element_size()
        places.append(Place(held, tensor.dtype, tuple(tensor.shape), start, end))
    return places, end


def serialize(content: Any, has_cuda: bool) -> str:
    """Tensors by reference, anything else by value, as text."""
    if has_cuda:
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
