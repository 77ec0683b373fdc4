"""Pushing a role's weights from the training ranks into the engines, bucket by bucket, with a checksum per tensor.

Each pipeline stage's leading rank sends its own tensors; nothing is gathered across stages. While an engine takes in
one bucket the next is being exported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray
from torch import Tensor

from megarl.rollout.payload import checksum, serialize_bucket

BUCKET_BYTES = 128 * 2**20
"""Tensors sent at once; two buckets exist at a time."""


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


def push_as_tensors(tensors: Iterator[tuple[str, Tensor]], engines: Sequence[Any], engine_tp: int) -> dict[str, str]:
    """Send tensors to every engine through shared memory; returns the checksum of each by Hugging Face name."""
    checksums: dict[str, str] = {}
    waiting: list[Any] = []
    for bucket in buckets(tensors):
        payloads = serialize_bucket(bucket, engine_tp)
        checksums |= {name: checksum(tensor) for name, tensor in bucket}
        ray.get(waiting)
        waiting = [engine.call.remote("update_from_payloads", payloads) for engine in engines]
    ray.get(waiting)
    return checksums
