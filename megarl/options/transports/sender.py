"""The trainer's side of weights by RDMA: registered buffers, and what ranks of an engine are told to read of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch.distributed import TCPStore

from megarl.errors import EngineError
from megarl.options.transports.rdma import ByteRange, Readable, RegisteredMemory, load_nixl
from megarl.options.transports.reader import Store
from megarl.weights.payloads import READ, NoTensor
from megarl.weights.rank_plan import WeightSlice
from megarl.weights.sglang_senders import POLL_S, ServerEndpoint, ServerSender, put_before
from megarl.weights.staging import ALIGN_BYTES, BUFFERS, Spec, StagedSlices, Staging, ZeroCopy, serialize

READ_BYTES = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}
"""By device what an engine's rank reads into one of its windows, at most, beside larger pieces. On CUDA an estimate. It has two
for each of the senders that it reads from at once (`intake_ranks.THREADS`).
"""


class RegisteredSlices(StagedSlices):
    """Staged pieces in a buffer that is registered with `memory`."""

    def __init__(self, staged: StagedSlices, memory: RegisteredMemory) -> None:
        """Take over all of `staged`, its list of readers included, for which the buffer waits."""
        vars(self).update(vars(staged))
        self.memory = memory


class RegisteredStaging(Staging):
    """Buffers that processes on any machine read from, kept and registered from update to update, on a GPU too."""

    _reads_where_they_lie = False

    def __init__(self, buffers: int = BUFFERS, name: str = "") -> None:
        """Raises EngineError where NIXL cannot be imported."""
        super().__init__(buffers, name)
        self._memory = RegisteredMemory(name)

    def stage(self, pieces: Sequence[WeightSlice], *, hashed: bool = True) -> RegisteredSlices:
        staged = super().stage(pieces, hashed=hashed)
        if staged.buffer is not None and staged.buffer.is_cuda:  # who reads it does not know of the stream that fills it
            torch.cuda.current_stream(staged.buffer.device).synchronize()
        return RegisteredSlices(staged, self._memory)

    def free_on_gpu(self) -> None:
        """Keep them: to register memory takes longer than to fill it."""

    def _share(self, buffer: torch.Tensor, old: torch.Tensor | None) -> None:
        if old is not None:
            self._memory.forget(old)
        self._memory.register(buffer)


class ReadSender(ServerSender):
    """Has each rank of an engine, on whatever machine, read its own slices from this process's registered buffers."""

    in_flight = 2  # a rank takes several at once, in any order, and need not wait for the next to come
    _calls = count()
    """Numbers of the calls of all senders of this process: an engine that was lost may have left keys of its calls."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float = 300.0) -> None:
        """Raises EngineError where NIXL cannot be imported."""
        super().__init__(endpoint, timeout_s)
        load_nixl()
        self._store: TCPStore | None = None

    def staging(self, name: str, buffers: int = BUFFERS) -> Staging | ZeroCopy:
        """Registered buffers."""
        return RegisteredStaging(buffers, name)

    def join(self) -> None:
        """Connect with the store in which the engine's ranks say how their reads went."""
        if self._store is not None:
            return
        try:
            self._store = TCPStore(*self.endpoint.store, is_master=False, timeout=timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise EngineError(f"the store of {self.endpoint.url} does not answer: {error}") from error

    def deliver(self, staged: StagedSlices) -> None:
        """Tell every rank where its weights are; returns when all have read them, or raises EngineError."""
        self.join()
        assert self._store is not None, "it has joined"
        assert isinstance(staged, RegisteredSlices), "it was staged in registered buffers"
        assert staged.buffer is not None, "these pieces are in no buffer"
        source, call = staged.memory.readable(staged.buffer), next(self._calls)
        payloads, keys = list[str | None](), list[str]()
        for rank, specs in enumerate(staged.specs(self.endpoint.layout.target.ranks)):
            if not specs:
                payloads.append(None)
                continue
            keys.append(f"{source.agent}/read/{call}/{rank}")
            parts = parts_to_read(specs, READ_BYTES[staged.buffer.device.type])
            payload = reading(source, self.endpoint.store, keys[-1], self.timeout_s, parts, checked=staged.checked)
            payloads.append(serialize(payload))
        loading = put_before(self.endpoint, payloads, self.timeout_s)
        while not loading.ended():
            staged.memory.progress()
            time.sleep(POLL_S)
        loading.raise_if_failed()
        self._raise_if_a_rank_failed(self._store, keys)

    def _raise_if_a_rank_failed(self, store: TCPStore, keys: Sequence[str]) -> None:
        """Each rank says how it went before SGLang, which waits for all of them, answers."""
        try:
            if not store.check(list(keys)):
                raise EngineError(f"{self.endpoint.url} answered an update before all its ranks had read their weights")
            reasons = [store.get(key).decode() for key in keys]
            for key in keys:
                store.delete_key(key)
        except RuntimeError as error:
            raise EngineError(f"the store of {self.endpoint.url} does not answer: {error}") from error
        for why in filter(None, reasons):
            raise EngineError(f"{self.endpoint.url} could not take the weights: {why}")


def parts_to_read(specs: Sequence[Spec], most_bytes: int) -> list[tuple[list[ByteRange], list[Spec]]]:
    """The parts of a buffer that a rank takes, in parts of at most `most_bytes`, or one larger piece.

    Of each part: the bytes to read, ranges that follow each other in the buffer as one, and the pieces where they are in the
    window then.
    """
    parts: list[tuple[list[ByteRange], list[Spec]]] = []
    end = 0
    for *what, start, stop in specs:
        at = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        if not parts or at + stop - start > most_bytes:
            parts.append(([], []))
            at = 0
        ranges, pieces = parts[-1]
        if ranges and start - ranges[-1].start == at - ranges[-1].at:  # as far apart in the buffer as in the window
            ranges[-1] = ranges[-1]._replace(stop=stop)
        else:
            ranges.append(ByteRange(start, stop, at))
        end = at + stop - start
        pieces.append((*what, at, end))
    return parts


def reading(
    source: Readable, store: Store, key: str, timeout_s: float, parts: Iterable[Any], *, checked: bool = False
) -> list[tuple[Any, Any]]:
    """The payload by which a rank reads parts (`parts_to_read`) of a registered buffer, in at most `timeout_s` seconds.

    It then sets `key` in the store, to why it could not if it could not: SGLang answers for its first rank alone. `checked`: as
    of `payloads.receiving`.
    """
    plain = [([tuple(span) for span in ranges], list(pieces)) for ranges, pieces in parts]  # SGLang takes no other classes
    options = {"timeout_s": timeout_s, "checked": checked}
    return [((READ, (tuple(source), store, key, options, plain)), NoTensor())]
