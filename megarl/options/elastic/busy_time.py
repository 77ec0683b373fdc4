"""Seconds of own work of a rank: those of its passes, but for those in which it waits for other ranks in a collective.

On a CPU a collective is waited for where it is asked for. A GPU's stream waits, so there events on the stream before and behind
each collective tell how long; seconds until a rank's own data are moved count as waiting, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from megarl.data.stream import MicroBatch
    from megarl.megatron.rank_model import RankModel

PHASES = ("forward", "update")
"""Passes that are timed, by the names of the methods of `RankModel`."""
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "reduce",
    "broadcast", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base",
    "barrier", "send", "recv", "gather", "scatter",
)  # fmt: skip
"""Methods of torch's `ProcessGroup` that may wait for other ranks."""


@dataclass
class _Waits:
    """Seconds of this process in collectives."""

    seconds: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)
    is_on: bool = False

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that may wait."""

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return method(*args, **kwargs)
            begin = _mark()
            try:
                return method(*args, **kwargs)
            finally:
                end = _mark()
                if isinstance(begin, float) and isinstance(end, float):
                    self.seconds += end - begin
                elif begin is not None and end is not None:
                    self.events.append((begin, end))

        return wrapper

    def take(self) -> float:
        """Seconds since the last call; the device must be done with all of them."""
        of_device = sum(begin.elapsed_time(end) for begin, end in self.events) / 1e3
        seconds, self.seconds = self.seconds + of_device, 0.0
        self.events.clear()
        return seconds


_waits = _Waits()


@dataclass
class _OwnWork:
    """By phase the seconds and tokens since the last question."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))


_work: WeakKeyDictionary[RankModel, _OwnWork] = WeakKeyDictionary()


def seconds_of_a_token(model: RankModel) -> tuple[float, ...]:
    """By phase of `PHASES` the seconds of own work for a token since the last question; 0 where nothing was done.

    The first question has the passes of this role timed from then on.
    """
    if model not in _work:
        _watch(model)
    work = _work[model]
    _work[model] = _OwnWork()
    return tuple(work.seconds[phase] / work.tokens[phase] if work.tokens[phase] else 0.0 for phase in PHASES)


def _watch(model: RankModel) -> None:
    from torch._C._distributed_c10d import ProcessGroup, Work

    if not hasattr(Work.wait, "__wrapped__"):
        Work.wait = _waits.timed(Work.wait)  # type: ignore[method-assign]
        for name in COLLECTIVES:
            setattr(ProcessGroup, name, _waits.timed(getattr(ProcessGroup, name)))
    _work[model] = _OwnWork()
    for phase in PHASES:
        setattr(model, phase, _timed(model, phase))


def _timed(model: RankModel, phase: str) -> Callable[..., Any]:
    from megarl import platform

    whole: Callable[..., Any] = getattr(model, phase)
    shares_prompts = model.options.shares_prefixes

    @functools.wraps(whole)
    def wrapper(micro_batches: Sequence[MicroBatch], *args: Any, **kwargs: Any) -> Any:
        began, _waits.is_on = time.perf_counter(), True
        try:
            result = whole(micro_batches, *args, **kwargs)
            platform.current().synchronize()
        finally:
            _waits.is_on = False
            waited = _waits.take()
        work = _work[model]
        work.seconds[phase] += time.perf_counter() - began - waited
        work.tokens[phase] += tokens_in(micro_batches, shares_prompts=shares_prompts)
        return result

    return wrapper


def tokens_in(micro_batches: Sequence[MicroBatch], *, shares_prompts: bool) -> int:
    """Tokens that are computed: a prompt once, or once for each response to it."""
    return sum(
        len(unit.prompt_ids) * (1 if shares_prompts else len(unit.responses))
        + sum(len(response.token_ids) for response in unit.responses)
        for units in micro_batches
        for unit in units
    )


def _mark() -> Any:
    """The time now, or on a device an event on its stream; None where neither can be had."""
    import torch

    from megarl import platform

    if platform.current().name == "cpu":
        return time.perf_counter()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
