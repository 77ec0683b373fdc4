"""Pushing a role's weights from the training ranks into the engines, bucket by bucket, with a checksum per tensor.

Each pipeline stage's leading rank sends its own tensors straight to the engines; nothing is gathered across stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import ray
from torch import Tensor

from megarl.rollout.sglang_senders import DistributedSender, Endpoint, TensorSender

BUCKET_BYTES = 64 * 2**20
"""Tensors sent at once, at most."""

Target = Any
"""An SGLang server's `Endpoint`, or the Ray handle of an actor that holds an engine without a server."""


class Sender(Protocol):
    """What pushes one rank's tensors into one engine."""

    def send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Send some tensors; they may be changed as soon as this has returned."""

    def checksums(self) -> dict[str, str]:
        """Checksums of everything sent since the last call."""


class ActorSender:
    """Sends through the engine's actor; the engine itself takes the checksums."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Hand the tensors to the engine by way of Ray's object store."""
        ray.get(self.actor.call.remote("apply_update", list(bucket)))

    def checksums(self) -> dict[str, str]:
        """Nothing to add: see the class."""
        return {}


def open_sender(target: Target, transport: str, group_address: tuple[str, int], backend: str) -> Sender:
    """The sender for `target`. `transport` is `tensors` (shared memory) or `process_group` (rendezvous at `group_address`)."""
    if not isinstance(target, Endpoint):
        return ActorSender(target)
    if transport == "tensors":
        return TensorSender(target)
    address, port = group_address
    name = f"megarl_weights_{port}"
    return DistributedSender(target, master_address=address, master_port=port, backend=backend, group_name=name)


def buckets(tensors: Iterator[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Tensor]]]:
    """Group named tensors, in order, into lists of at most `bucket_bytes`; a larger tensor is a bucket of its own."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def push(tensors: Iterator[tuple[str, Tensor]], senders: Sequence[Sender]) -> list[dict[str, str]]:
    """Send tensors through every sender; returns each one's checksums."""
    for bucket in buckets(tensors):
        for sender in senders:
            sender.send(bucket)
    return [sender.checksums() for sender in senders]
