"""Pushing a role's weights from the training ranks into the engines, bucket by bucket, with a checksum per piece.

Every rank sends what the reshard plan has it send, cut from its own shards (`Pusher.push_loads`); where engines take whole
tensors only, each pipeline stage's leading rank sends those of its stage (`Pusher.push`). An engine that fails is left behind;
the others get everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np
from torch import Tensor

from megarl.errors import EngineError
from megarl.models.weight_tensors import gathered
from megarl.weights.delta import SentWeights
from megarl.weights.digests import SentDigests, Table, by_engine, sums_by_rank
from megarl.weights.plan import LOAD_BYTES
from megarl.weights.rank_plan import SendBatch, SliceKey, WeightSlice
from megarl.weights.sglang_senders import checksums_of
from megarl.weights.staging import StagedSlices, Staging, ZeroCopy


@dataclass(frozen=True)
class Pushed:
    """The result of a push to one engine: the checksum of every piece sent, or in one sentence why the engine failed.

    `nbytes` were handed to the transport.
    """

    checksums: dict[SliceKey, str] = field(default_factory=dict)
    error: str | None = None
    nbytes: int = 0


class Sender(Protocol):
    """A sender of one rank's tensors into one engine."""

    in_flight: int
    """How many loads it may be given at a time, each in a thread of its own."""
    waits_for_others: bool
    """Whether an engine takes what all its senders deliver together, so that each must deliver, if nothing."""
    is_checked: bool
    """Whether checksums taken here say what the engine's ranks must hold; else the engine takes its own."""

    def staging(self, name: str) -> Staging | ZeroCopy:
        """The buffers that pieces are copied into so that the engine can read them, or what leaves them where they are.

        One serves all engines of a run. `name` tells it from those of other ranks.
        """

    def pieces(self, bucket: Sequence[tuple[str, Tensor]]) -> list[WeightSlice]:
        """The pieces that it must be given of whole tensors for this engine; the same for all engines of a run."""

    def join(self) -> None:
        """Make what connects this process with the engine; raises EngineError. All of an engine's senders do it together."""

    def deliver(self, staged: StagedSlices) -> None:
        """Send what has been staged; returns when the engine has taken it over, or raises EngineError."""

    def close(self) -> None:
        """Give back what is held for the connection; raises EngineError if the engine does not answer."""


class Pusher:
    """One rank's connections to the engines, by the engine's number, and the two buffers that all of them read from.

    `name` tells its buffers from those of the other ranks. `choose_device` is called first in every thread that hashes or
    sends: a thread begins on the first GPU that the process sees, whichever the rank's own is. Whole tensors are gathered into
    loads of at most `load_bytes`; other loads come as they are.
    """

    def __init__(
        self, name: str = "0", choose_device: Callable[[], None] | None = None, load_bytes: int = LOAD_BYTES["cpu"]
    ) -> None:
        self.name, self.choose_device, self.load_bytes = name, choose_device, load_bytes
        self.senders: dict[int, Sender] = {}
        self.unreachable: dict[int, str] = {}
        self._sent = SentWeights()
        self._staging: Staging | ZeroCopy | None = None

    @property
    def staging_bytes(self) -> int:
        """Memory that the buffers take: two of the largest load so far, or none where nothing is staged."""
        return self._staging.bytes if self._staging is not None else 0

    def connect(self, engine: int, open_it: Callable[[], Sender]) -> None:
        """Replace the connection to `engine` by what `open_it()` gives; if that raises EngineError, pushes will say so."""
        self.disconnect(engine)
        try:
            self.senders[engine] = open_it()
        except EngineError as error:
            self.unreachable[engine] = str(error)

    def disconnect(self, engine: int) -> None:
        """Forget `engine`, which may be gone already."""
        self.unreachable.pop(engine, None)
        sender = self.senders.pop(engine, None)
        if sender is not None:
            with contextlib.suppress(EngineError):
                sender.close()

    def push(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        bases: Mapping[int, int | None] | None = None,
        version: int | None = None,
        *,
        verify: bool = True,
    ) -> dict[int, Pushed]:
        """Push, as `push_loads`, whole tensors to all engines in `bases` (None: all). Always exhausts `tensors`."""
        bases = dict.fromkeys([*self.senders, *self.unreachable]) if bases is None else bases
        reached = [engine for engine in bases if engine in self.senders]
        pieces = self.senders[reached[0]].pieces if reached else None

        def loads() -> Iterator[SendBatch]:
            for bucket in gathered(tensors, self.load_bytes, lambda named: named[1].nbytes):
                if pieces is not None:  # else the export is collective all the same
                    yield SendBatch(pieces(bucket), frozenset(reached))

        return self.push_loads(loads(), bases, version, verify=verify)

    def push_loads(
        self, loads: Iterator[SendBatch], bases: Mapping[int, int | None], version: int | None = None, *, verify: bool = True
    ) -> dict[int, Pushed]:
        """Send loads, weights of `version`, to those of their engines that are in `bases`: by engine what came of it.

        An engine whose base is the version that this rank sent last gets what has changed since; any other gets everything.
        Relayed loads are always sent, and their checksums are not taken here. Without `version` nothing is remembered. Without
        `verify` no checksums are taken: the engine then only knows that everything has come.

        Always exhausts `loads`. The next one is staged while the engines read the last, each in its own time; a buffer is
        filled again when every engine has read it or failed.
        """
        failed = {engine: Pushed(error=self.unreachable[engine]) for engine in bases if engine in self.unreachable}
        lanes = {engine: _EngineQueue(self.senders[engine], self.choose_device) for engine in bases if engine in self.senders}
        if not lanes:
            for _ in loads:
                pass
            return failed
        deltas = {engine for engine in lanes if bases[engine] is not None and bases[engine] == self._sent.version}
        sender = next(iter(lanes.values())).sender
        self._staging = self._staging or sender.staging(self.name)
        for _, lane in sorted(lanes.items()):  # the same order in all ranks, or two could wait for each other
            lane.join()
        hashing = ThreadPoolExecutor(1, thread_name_prefix="hash", initializer=self.choose_device)
        self._sent.begin()
        try:
            # what has changed is told load by load, while the engines read the last one
            for load in loads if version is not None else _gathered(loads, self._staging):
                hashed = not load.relayed and (version is not None or (verify and sender.is_checked))
                staged = self._staging.stage(load.pieces, hashed=hashed)
                staged.checked = verify and sender.is_checked
                changed = self._changed(staged) if version is not None and not load.relayed else staged.pieces
                of_lanes = [(engine, lane) for engine, lane in lanes.items() if engine in load.engines]
                checksums = None
                if sender.is_checked and not load.relayed:
                    checksums = hashing.submit(checksums_of, staged, values=verify)
                    staged.readers.append(checksums)
                for engine, lane in of_lanes:
                    if checksums is not None:
                        lane.checksums.append(checksums)
                    if engine not in deltas or load.relayed:
                        staged.readers.append(lane.submit(staged))
                    elif changed or lane.sender.waits_for_others:
                        staged.readers.append(lane.submit(staged.only(changed)))
            if version is not None:
                self._sent.sent(version)
            return failed | {engine: lane.result() for engine, lane in lanes.items()}
        finally:
            for pool in (hashing, *(lane.pool for lane in lanes.values())):
                pool.shutdown()
            self._staging.free_on_gpu()

    def _changed(self, staged: StagedSlices) -> list[WeightSlice]:
        """The pieces whose bits are not those of the last push; remembers what they are."""
        staged.take_digests(staged.pieces)
        return [piece for piece in staged.pieces if self._sent.changed(piece.held, staged.digest(piece))]


def _gathered(loads: Iterator[SendBatch], staging: Staging | ZeroCopy) -> Iterator[SendBatch]:
    """The loads, but those in a row that engines read where they lie as one: it takes no memory, and a call less each."""
    alike = groupby(loads, lambda load: (staging.reads_in_place(load.pieces), load.engines, load.relayed))
    for (in_place, engines, relayed), some in alike:
        if in_place:
            yield SendBatch([piece for load in some for piece in load.pieces], engines, relayed)
        else:
            yield from some


class _EngineQueue:
    """One engine's share of a push, in threads of its own; after its first failure, nothing more is delivered."""

    def __init__(self, sender: Sender, choose_device: Callable[[], None] | None) -> None:
        self.sender = sender
        self.error: str | None = None
        self.nbytes = 0
        self.checksums: list[Future[dict[SliceKey, str]]] = []
        self.pool = ThreadPoolExecutor(sender.in_flight, thread_name_prefix="push", initializer=choose_device)
        self._all: list[Future[None]] = []

    def join(self) -> None:
        """Connect; a failure is that of all that follows."""
        self._all.append(self.pool.submit(self._unless_failed, self.sender.join))
        self._all[-1].result()

    def submit(self, staged: StagedSlices) -> Future[None]:
        """Deliver `staged` after what was submitted before."""
        self.nbytes += sum(tensor.nbytes for _, tensor in staged.pieces)
        self._all.append(self.pool.submit(self._unless_failed, partial(self.sender.deliver, staged)))
        return self._all[-1]

    def _unless_failed(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except EngineError as error:
                self.error = self.error or str(error)

    def result(self) -> Pushed:
        """Wait for the engine, and say what came of it; raises what taking the checksums raised."""
        for future in self._all:
            future.result()
        if self.error is not None:
            return Pushed(error=self.error)
        checksums = {slice_key: checksum for of_load in self.checksums for slice_key, checksum in of_load.result().items()}
        return Pushed(checksums, nbytes=self.nbytes)


@dataclass(frozen=True)
class PushSummary:
    """Result of pushes to several engines, in a few bytes for each rank of an engine: what was sent, why some failed."""

    sent: Table
    errors: dict[int, str] = field(default_factory=dict)
    nbytes: int = 0

    @classmethod
    def of(cls, pushed: Mapping[int, Pushed]) -> PushSummary:
        """Return that of one training rank's pushes."""
        errors = {engine: result.error for engine, result in pushed.items() if result.error is not None}
        tables = [sums_by_rank(result.checksums, engine) for engine, result in pushed.items()]
        nbytes = sum(result.nbytes for result in pushed.values())
        return cls(np.concatenate([sums_by_rank({}), *tables]), errors, nbytes)


@dataclass(frozen=True)
class UpdateSummary:
    """Sums of what all ranks sent to each engine, and why some failed: the first rank's error."""

    sent: Mapping[int, SentDigests]
    errors: Mapping[int, str]
    nbytes: int

    @classmethod
    def of(cls, of_ranks: Sequence[PushSummary]) -> UpdateSummary:
        """Return that of one update, from all ranks."""
        errors: dict[int, str] = {}
        for summary in of_ranks:
            errors = summary.errors | errors if summary.errors else errors
        return cls(by_engine([one.sent for one in of_ranks]), errors, sum(one.nbytes for one in of_ranks))
