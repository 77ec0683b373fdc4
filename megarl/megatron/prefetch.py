"""Micro-batches of a pass, made in a thread: while the device computes one, the next is laid and on its way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Item = TypeVar("Item")


class Prefetched(Generic[Item]):
    """The values that `makers` make, one after the other in one thread, each as soon as the one before it is taken for
    the first time.

    Each is taken by `takers` iterators, in order, and forgotten when all have it. Use it as a context.
    """

    def __init__(self, makers: Sequence[Callable[[], Item]], device: torch.device, takers: int = 1) -> None:
        self._makers, self._device, self._takers = makers, device, takers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megarl-prefetch")
        self._stream = _copy_stream(device) if device.type == "cuda" else None
        self._waiting: dict[int, Future[tuple[Item, _Arrival | None]]] = {}
        self._begun = 0
        self._taken = [0] * len(makers)

    def __enter__(self) -> Prefetched[Item]:
        self._begin(1)
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()

    def iterator(self) -> Iterator[Item]:
        """All of them, for one taker; an exception of a maker is raised where its item is taken."""
        for number in range(len(self._makers)):
            self._begin(number + 1)
            item, arrival = self._waiting[number].result()
            self._begin(number + 2)
            if arrival is not None and not self._taken[number]:
                arrival.await_on(torch.cuda.current_stream(self._device))
            self._taken[number] += 1
            if self._taken[number] == self._takers:
                del self._waiting[number]
            yield item
            del item, arrival

    def _begin(self, wanted: int) -> None:
        """Have the first `wanted` made."""
        while self._begun < min(wanted, len(self._makers)):
            self._waiting[self._begun] = self._thread.submit(self._make, self._makers[self._begun])
            self._begun += 1

    def _make(self, maker: Callable[[], Item]) -> tuple[Item, _Arrival | None]:
        if self._stream is None:
            return maker(), None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), pinned_copies() as copies:
            item = maker()
            return item, _Arrival(self._stream.record_event(), copies)


@cache
def _copy_stream(device: torch.device) -> Any:
    """One for all passes: the allocator keeps memory of its own for each stream."""
    return torch.cuda.Stream(device)


class _Arrival:
    """The copies of an item that a stream makes, and the event behind the last of them."""

    def __init__(self, event: Any, copies: Sequence[Tensor]) -> None:
        self._event, self._copies = event, copies

    def await_on(self, stream: Any) -> None:
        """Have `stream`, not the host, wait for the copies, whose memory is not used again before it has done what follows."""
        stream.wait_event(self._event)
        for copy in self._copies:
            copy.record_stream(stream)


@contextmanager
def pinned_copies() -> Iterator[list[Tensor]]:
    """Inside, in this thread, `tensor.to(device)` of a tensor in main memory is a copy that the host doesn't wait for.

    It yields the list of these copies so far.
    """
    copies: list[Tensor] = []
    with _PinnedCopies(copies):
        yield copies


class _PinnedCopies(TorchFunctionMode):
    def __init__(self, copies: list[Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.to and len(args) == 2 and isinstance(args[1], torch.device) and not kwargs:
            source, device = args
            if source.device.type == "cpu" and device.type != "cpu":
                copy = source.pin_memory().to(device, non_blocking=True)
                self._copies.append(copy)
                return copy
        return function(*args, **kwargs)


def on_device(value: Any, device: torch.device) -> Any:
    """`value` with the tensors in it on `device`: those of dataclasses, tuples and mappings of any depth."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        values = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return replace(value, **{name: on_device(part, device) for name, part in values.items()})
    if isinstance(value, tuple):
        return tuple(on_device(part, device) for part in value)
    if isinstance(value, Mapping):
        return {name: on_device(part, device) for name, part in value.items()}
    return value
