"""Weights as bytes that an SGLang server can read, made without importing SGLang.

A request carries only a handle; the values lie in shared memory (CPU), are reached over CUDA IPC or come another way, in the
format that `sglang_loader.load` reads inside the server: where each piece lies, and where in a parameter it belongs.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from copy import copy as shallow_copy
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import torch

from megarl.platform.shared_memory import sharing_by_file
from megarl.weights.checksums import digests
from megarl.weights.copying import copy, copy_hashed
from megarl.weights.cuda_ipc import shared
from megarl.weights.payloads import opening
from megarl.weights.rank_plan import SliceKey, WeightSlice

Spec = tuple[Any, ...]
"""A piece in a buffer: `(*held, dtype, start, stop)`."""
NamedTensors = Sequence[tuple[str, torch.Tensor]]
"""Weights under their Hugging Face names, unsharded; a tied `lm_head.weight` is not sent."""
SLICED = "megarl.weights.sglang_loader.load"
ALIGN_BYTES = 16  # any dtype may be viewed at any weight's start
BUFFERS = 2  # one is filled while the engine reads the other


class StagedSlices:
    """Pieces where engines can read them: in a buffer that other processes open, or just where the sender holds them.

    `name` is the buffer's: another under this name has replaced it.
    """

    def __init__(
        self,
        pieces: Sequence[WeightSlice],
        buffer: torch.Tensor | None = None,
        name: str = "",
        digests: dict[SliceKey, str] | None = None,
    ) -> None:
        self.pieces, self.buffer, self.name = pieces, buffer, name
        self.readers: list[Future[Any]] = []
        self.checked = False  # whether engines will be asked for the checksums
        self._digests = {} if digests is None else digests

    def only(self, pieces: Sequence[WeightSlice]) -> Self:
        """The same, but only these pieces are to be read."""
        part = shallow_copy(self)
        part.pieces, part.readers = pieces, []
        return part

    def digest(self, piece: WeightSlice) -> str:
        """The checksum of one of the pieces, which is taken once."""
        self.take_digests([piece])
        return self._digests[piece.held]

    def take_digests(self, pieces: Iterable[WeightSlice]) -> None:
        """Take the checksums of some of the pieces, those that are not known, at once."""
        unknown = [piece for piece in pieces if piece.held not in self._digests]
        if not unknown:
            return
        taken = digests([piece.tensor for piece in unknown])
        self._digests |= {piece.held: checksum for piece, checksum in zip(unknown, taken, strict=True)}

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Names and values, as views of where they lie."""
        return [(key.tensor, tensor) for key, tensor in self.pieces]

    def payloads(self, ranks: int) -> list[str | None]:
        """One payload per rank of the engine, base64 text of about 100 bytes per piece; the values lie in the buffer once.

        A rank that takes nothing of the buffer has none: it may be on another machine, where it could not open it.

        The payloads are not interchangeable: each holds a reference to the shared memory which the rank that opens it gives
        back, and with the last of them the memory is gone.
        """
        assert self.buffer is not None, "these pieces are in no buffer"
        of_ranks = self.specs(ranks)
        if self.buffer.is_cuda:
            return [serialize(opening(shared(self.buffer), specs)) if specs else None for specs in of_ranks]
        return [serialize([((self.name, (specs, self.checked)), self.buffer)]) if specs else None for specs in of_ranks]

    def specs(self, ranks: int) -> list[list[Spec]]:
        """By rank of the engine, what it takes of the buffer."""
        assert self.buffer is not None, "these pieces are in no buffer"
        return _specs(self.pieces, self.buffer, ranks)


class SharedSlices(StagedSlices):
    """Pieces in memory that engines open, just where the sender holds them; `name` is the sender's."""

    def payloads(self, ranks: int) -> list[str | None]:
        """Payloads as of a buffer, but of each block of memory that holds some of the pieces."""
        blocks: dict[int, list[WeightSlice]] = {}
        for piece in self.pieces:
            blocks.setdefault(piece.tensor.untyped_storage().data_ptr(), []).append(piece)
        of_ranks: list[list[Any]] = [[] for _ in range(ranks)]
        for address, pieces in blocks.items():
            block = torch.empty(0, dtype=torch.uint8).set_(pieces[0].tensor.untyped_storage())
            for rank, specs in enumerate(_specs(pieces, block, ranks)):
                if specs:
                    of_ranks[rank].append(((f"{self.name}@{address}", (specs, self.checked)), block))
        return [serialize(content) if content else None for content in of_ranks]


def _specs(pieces: Sequence[WeightSlice], buffer: torch.Tensor, ranks: int) -> list[list[Spec]]:
    of_ranks: list[list[Spec]] = [[] for _ in range(ranks)]
    for key, tensor in pieces:
        start = tensor.data_ptr() - buffer.data_ptr()
        spec = (*key, dtype_name(tensor), start, start + tensor.nbytes)
        for rank in key.ranks(ranks):
            of_ranks[rank].append(spec)
    return of_ranks


class ZeroCopy:
    """Leaves pieces where they are, for all their readers at once: who gives them keeps them until they were read."""

    bytes = 0

    def __init__(self) -> None:
        self._digests: dict[SliceKey, str] = {}

    def free_on_gpu(self) -> None:
        """There is nothing to give back; of what was staged since the last call, the checksums are forgotten."""
        self._digests = {}

    def reads_in_place(self, pieces: Sequence[WeightSlice]) -> bool:
        """Loads are sent as they come."""
        return False

    def stage(self, pieces: Sequence[WeightSlice], *, hashed: bool = True) -> StagedSlices:
        """The pieces as they are; checksums are taken when they are asked for, of a piece for several engines once."""
        return StagedSlices(pieces, digests=self._digests)


class Staging:
    """Byte buffers that buckets are copied into in turn, kept from update to update.

    New shared memory costs more than copying into it: every page of it is first cleared by the kernel. A buffer is not
    filled again before everything in its bucket's `readers` is done. What lies in shared memory already (`share`) is not
    copied: whoever changes it must wait until it was read.
    """

    _reads_where_they_lie = True

    def __init__(self, buffers: int = BUFFERS, name: str = "") -> None:
        self._name = name
        self._buffers: list[torch.Tensor | None] = [None] * buffers
        self._staged: list[StagedSlices | None] = [None] * buffers
        self._next = 0

    @property
    def bytes(self) -> int:
        """Memory that the buffers take now."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def reads_in_place(self, pieces: Sequence[WeightSlice]) -> bool:
        """Return whether engines open these pieces where they lie, in memory that is shared."""
        return self._reads_where_they_lie and all(_can_be_opened(piece.tensor) for piece in pieces)

    def stage(self, pieces: Sequence[WeightSlice], *, hashed: bool = True) -> StagedSlices:
        """Copy `pieces` into the next buffer, on a CPU with their checksums if they are wanted (`hashed`)."""
        if self.reads_in_place(pieces):
            return SharedSlices(pieces, name=self._name)
        number, self._next = self._next, (self._next + 1) % len(self._buffers)
        _wait_for_readers(self._staged[number])
        size = packed_starts(pieces)[-1]
        buffer = self._at_least(number, size, pieces[0].tensor.device)[:size]
        staged = self._staged[number] = pack(pieces, buffer, f"{self._name}/{number}", hashed=hashed)
        return staged

    def free_on_gpu(self) -> None:
        """Give back buffers on a GPU, which are cheap to make anew there: torch remembers each time that one was shared."""
        if any(buffer is not None and buffer.is_cuda for buffer in self._buffers):
            self._buffers, self._staged = [None] * len(self._buffers), [None] * len(self._staged)

    def _at_least(self, number: int, size: int, device: torch.device) -> torch.Tensor:
        buffer = self._buffers[number]
        if buffer is None or buffer.numel() < size or buffer.device != device:
            old, buffer = buffer, torch.empty(size, dtype=torch.uint8, device=device)
            self._share(buffer, old)
            self._buffers[number] = buffer
        return buffer

    def _share(self, buffer: torch.Tensor, old: torch.Tensor | None) -> None:
        """Make a buffer, perhaps in place of an `old` one, one that engines can read."""
        if buffer.device.type == "cpu":
            with sharing_by_file():
                buffer.share_memory_()


def _can_be_opened(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_shared() and tensor.is_contiguous()


def _wait_for_readers(staged: StagedSlices | None) -> None:
    for reader in staged.readers if staged is not None else ():
        reader.exception()  # waits; a failure is its owner's to report


def packed_starts(pieces: Sequence[WeightSlice]) -> list[int]:
    """The beginnings of `pieces` in a buffer of bytes, and where the last one ends."""
    starts, end = [], 0
    for _, tensor in pieces:
        starts.append(-(-end // ALIGN_BYTES) * ALIGN_BYTES)
        end = starts[-1] + tensor.nbytes
    return [*starts, end]


def pack(pieces: Sequence[WeightSlice], buffer: torch.Tensor, name: str = "", *, hashed: bool = False) -> StagedSlices:
    """Copies of `pieces` in `buffer`, on a CPU with their checksums if they are wanted (`hashed`)."""
    copies, taken = [], {}
    for start, (key, tensor) in zip(packed_starts(pieces)[:-1], pieces, strict=True):
        to = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if hashed and not to.is_cuda:
            taken[key] = copy_hashed(to, tensor.detach())
        else:
            copy(to, tensor.detach())
        copies.append(WeightSlice(key, to))
    return StagedSlices(copies, buffer, name, digests=taken)


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of the dtype, as `getattr(torch, ...)` takes it."""
    return str(tensor.dtype).removeprefix("torch.")


def serialize(content: Any) -> str:
    """Tensors of main memory by reference, anything else by value, as text."""
    stream = io.BytesIO()
    with sharing_by_file():
        ForkingPickler(stream).dump(content)
    return base64.b64encode(stream.getvalue()).decode()
