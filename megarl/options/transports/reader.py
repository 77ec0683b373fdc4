"""The engine's side of weights by RDMA: a rank reads what is its own of a sender's buffer; runs inside the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import TCPStore

from megarl.errors import EngineError
from megarl.options.transports.rdma import ByteRange, Readable, RemoteReader

Store = tuple[str, int]
"""Host and port of an engine's store."""

_of_thread = threading.local()
"""What a thread reads with, and where it says how that went, by the engine's store; NIXL is imported when it first reads."""


def read(
    take: Callable[..., None],
    device: torch.device,
    source: tuple[Any, ...],
    where: Store,
    key: str,
    options: dict[str, Any],
    parts: Any,
) -> list[Any]:
    """Read what is this rank's of a sender's buffer, as `sender.reading` says; returns the pieces that came.

    `take(pieces, window, checked=...)` copies pieces from a window on `device` to where they belong.
    """
    readers: dict[Store, tuple[RemoteReader, TCPStore]] = vars(_of_thread).setdefault("readers", {})
    if where not in readers:
        readers[where] = RemoteReader(device), TCPStore(*where, is_master=False)
    reader, store = readers[where]
    ranges = [[ByteRange(*bounds) for bounds in of_part] for of_part, _ in parts]
    came, why = [], ""
    try:
        for window, (_, pieces) in zip(reader.read(Readable(*source), ranges, options["timeout_s"]), parts, strict=True):
            take(pieces, window, checked=options["checked"])
            came += pieces
    except EngineError as error:
        why = str(error)
    store.set(key, why)
    return came
