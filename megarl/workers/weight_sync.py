"""Pushing a role's weights from the training ranks into the engines, bucket by bucket, with a checksum per tensor.

Each pipeline stage's leading rank sends its own tensors straight to the engines; nothing is gathered across stages. An engine
that fails is left behind; the others get everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import ray
from torch import Tensor

from megarl.errors import EngineError
from megarl.reshard.delta import SentWeights
from megarl.rollout.checksums import SentChecksums
from megarl.rollout.payload import ALIGN_BYTES, Staged, Staging
from megarl.rollout.same_model import ModelFacts
from megarl.rollout.sglang_senders import DistributedSender, Endpoint, TensorSender

BUCKET_BYTES = 64 * 2**20
"""Tensors sent at once, at most."""

Target = Any
"""An SGLang server's `Endpoint`, or the Ray handle of an actor that holds an engine without a server."""


@dataclass(frozen=True)
class Pushed:
    """What a push to one engine came to: the checksum of every tensor sent, or in one sentence why the engine failed."""

    checksums: dict[str, str] = field(default_factory=dict)
    error: str | None = None


class Sender(Protocol):
    """What pushes one rank's tensors into one engine."""

    align_bytes: int
    in_flight: int
    """How many buckets it may be given at a time, each in a thread of its own."""

    def slices(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Sequence[Tensor]]]:
        """What `Staging.stage` must be given for this engine; the same for all engines of a run."""

    def new_checksums(self, values: bool) -> SentChecksums | None:
        """What takes the checksums of an update, or without `values` only sees that it is complete; None: the engine does."""

    def deliver(self, staged: Staged) -> None:
        """Send what has been staged; returns when its buffer may be filled again, or raises EngineError."""

    def finish(self) -> None:
        """Return when the engine has taken over everything that was delivered, or raise EngineError."""

    def close(self) -> None:
        """Give back what is held for the connection; raises EngineError if the engine does not answer."""


class ActorSender:
    """Sends through the engine's actor; the engine itself takes the checksums."""

    align_bytes = ALIGN_BYTES
    in_flight = 1

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def slices(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Sequence[Tensor]]]:
        """Whole tensors."""
        return [(name, [tensor]) for name, tensor in bucket]

    def new_checksums(self, values: bool) -> SentChecksums | None:
        """None: see the class."""
        return None

    def deliver(self, staged: Staged) -> None:
        """Hand the tensors to the engine by way of Ray's object store."""
        try:
            ray.get(self.actor.call.remote("apply_update", [(name, tensor.clone()) for name, tensor in staged.tensors()]))
        except ray.exceptions.RayError as error:
            raise EngineError(f"the engine's actor did not take the weights: {error}") from error

    def finish(self) -> None:
        """Nothing is under way any more."""

    def close(self) -> None:
        """Nothing is held."""


def model_of(target: Target) -> ModelFacts | None:
    """Which model an engine serves; None: that is not known, or it does not matter to it."""
    facts: ModelFacts | None = target.layout.model if isinstance(target, Endpoint) else ray.get(target.model.remote())
    return facts


def open_sender(
    target: Target, transport: str, group_address: tuple[str, int], backend: str, timeout_s: float = 300.0
) -> Sender:
    """The sender for `target`. `transport` is `tensors` (shared memory) or `process_group` (rendezvous at `group_address`).

    An engine that has not answered after `timeout_s` seconds has failed.
    """
    if not isinstance(target, Endpoint):
        return ActorSender(target)
    if transport == "tensors":
        return TensorSender(target, timeout_s)
    address, port = group_address
    return DistributedSender(
        target,
        master_address=address,
        master_port=port,
        backend=backend,
        group_name=f"megarl_weights_{port}",
        timeout_s=timeout_s,
    )


class Bucket:
    """Gathers named tensors, in order, into lists of at most `BUCKET_BYTES`; a larger tensor is a bucket of its own."""

    def __init__(self) -> None:
        self._tensors: list[tuple[str, Tensor]] = []
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> Iterator[list[tuple[str, Tensor]]]:
        """Take in a tensor; gives the bucket that it no longer fitted into, if there is one."""
        if self._bytes + tensor.nbytes > BUCKET_BYTES:
            yield from self.rest()
        self._tensors.append((name, tensor))
        self._bytes += tensor.nbytes

    def rest(self) -> Iterator[list[tuple[str, Tensor]]]:
        """What is left, if anything is."""
        if self._tensors:
            full, self._tensors, self._bytes = self._tensors, [], 0
            yield full


class Pusher:
    """One rank's connections to the engines, by the engine's number, and the two buffers that all of them read from."""

    def __init__(self) -> None:
        self.senders: dict[int, Sender] = {}
        self.unreachable: dict[int, str] = {}
        self._sent = SentWeights()
        self._staging: dict[int, Staging] = {}

    @property
    def staging_bytes(self) -> int:
        """Memory that the buffers take: two of the largest bucket so far."""
        return sum(staging.bytes for staging in self._staging.values())

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
        verify: bool = True,
    ) -> dict[int, Pushed]:
        """Send tensors, the weights of `version`, to the engines in `bases` (None: all): by engine what came of it.

        An engine whose base is the version that this rank sent last gets what has changed since; any other gets everything.
        Without `verify` no checksums are taken: the engine then only knows that all weights have come.

        Always exhausts `tensors`. The next bucket is filled while the engines read the last one, each in its own time; a
        buffer is filled again when every engine has read it or failed.
        """
        if bases is None:
            bases = dict.fromkeys([*self.senders, *self.unreachable])
        failed = {engine: Pushed(error=self.unreachable[engine]) for engine in bases if engine in self.unreachable}
        lanes = {engine: _Lane(self.senders[engine]) for engine in bases if engine in self.senders}
        if not lanes:
            for _ in tensors:  # the export is collective
                pass
            return failed
        known = self._sent.version
        deltas = {engine for engine in lanes if bases[engine] is not None and bases[engine] == known}
        one = next(iter(lanes.values())).sender
        staging = self._staging.setdefault(one.align_bytes, Staging(align_bytes=one.align_bytes))
        hashing = _Hashing(one.new_checksums(verify))
        try:
            for bucket, is_changed in self._buckets(tensors, version):
                to = [lane for engine, lane in lanes.items() if is_changed or engine not in deltas]
                staged = staging.stage(one.slices(bucket))
                staged.readers += [hashing.submit(staged), *(lane.submit(staged) for lane in to)]
            checksums = hashing.result()
            return failed | {engine: lane.result(checksums) for engine, lane in lanes.items()}
        finally:
            for pool in (hashing.pool, *(lane.pool for lane in lanes.values())):
                pool.shutdown()

    def _buckets(
        self, tensors: Iterator[tuple[str, Tensor]], version: int | None
    ) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
        """Buckets of weights that have changed since the last push, and of those that have not; without a version all have."""
        self._sent.begin()
        kinds = {True: Bucket(), False: Bucket()}
        for name, tensor in tensors:
            is_changed = version is None or self._sent.changed(name, tensor)
            yield from ((bucket, is_changed) for bucket in kinds[is_changed].add(name, tensor))
        for is_changed, bucket in kinds.items():
            yield from ((rest, is_changed) for rest in bucket.rest())
        if version is not None:
            self._sent.sent(version)


class _Lane:
    """One engine's share of a push, in threads of its own; after its first failure, nothing more is delivered."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.error: str | None = None
        self.pool = ThreadPoolExecutor(sender.in_flight, thread_name_prefix="push")
        self._all: list[Future[None]] = []

    def submit(self, staged: Staged) -> Future[None]:
        """Deliver `staged` after what was submitted before."""
        self._all.append(self.pool.submit(self._unless_failed, partial(self.sender.deliver, staged)))
        return self._all[-1]

    def _unless_failed(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except EngineError as error:
                self.error = self.error or str(error)

    def result(self, checksums: dict[str, str]) -> Pushed:
        """Wait for the engine, and say what came of it."""
        for future in self._all:
            future.result()
        self._unless_failed(self.sender.finish)
        return Pushed(checksums) if self.error is None else Pushed(error=self.error)


class _Hashing:
    """Checksums of everything staged, taken in a thread while the engines load it (hashing releases the GIL)."""

    def __init__(self, checksums: SentChecksums | None) -> None:
        self._checksums = checksums
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._all: list[Future[None]] = []

    def submit(self, staged: Staged) -> Future[None]:
        """Take the checksums of `staged` after what was submitted before."""
        self._all.append(self.pool.submit(self._add, staged))
        return self._all[-1]

    def _add(self, staged: Staged) -> None:
        if self._checksums is not None:
            of_ranks = [staged.tensors(rank) for rank in range(len(staged.places))]
            if len(of_ranks) == 1:
                self._checksums.add(of_ranks[0])
            else:
                self._checksums.add_slices(
                    [(parts[0][0], [part for _, part in parts]) for parts in zip(*of_ranks, strict=True)]
                )

    def result(self) -> dict[str, str]:
        """The checksums; raises what taking them raised."""
        for future in self._all:
            future.result()
        return self._checksums.result() if self._checksums is not None else {}


def merge(of_ranks: Sequence[Mapping[int, Pushed]]) -> dict[int, Pushed]:
    """What all ranks' pushes of one update came to, by engine: all checksums, or the first rank's error."""
    merged: dict[int, Pushed] = {}
    for pushed in of_ranks:
        for engine, one in pushed.items():
            before = merged.get(engine, Pushed())
            merged[engine] = Pushed(before.checksums | one.checksums, before.error or one.error)
    return merged
