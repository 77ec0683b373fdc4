"""Spans of wall time, from the driver's phases and from the calls that the ranks answer.

`trace.jsonl` has one object per step; `chrome_trace` makes of it what Perfetto and chrome://tracing show.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
Span = tuple[str, float, float]
"""An activity, and when it began and ended in seconds since the epoch."""
DRIVER = "driver"
TRACED_RANKS = 64
"""Ranks of a group whose spans are kept."""
KEPT = 1000
"""Newest spans that a rank keeps until it is asked for them."""
SHORTEST_S = 1e-4
"""Seconds of the shortest span that is written."""


def timed(*methods: str) -> Callable[[Class], Class]:
    """Class decorator: instances remember when each of these methods ran; `take_spans` gives and forgets that."""

    def decorate(cls: Class) -> Class:
        for name in methods:
            setattr(cls, name, _timed(getattr(cls, name)))
        return cls

    return decorate


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.__dict__.setdefault("_spans", deque(maxlen=KEPT)).append((method.__name__, began, time.time()))

    return wrapper


def take_spans(instance: Any) -> list[Span]:
    """The spans of an instance of a `timed` class since the last call."""
    spans = instance.__dict__.get("_spans", deque())
    return [spans.popleft() for _ in range(len(spans))]


class PhaseSpans:
    """The spans of the driver's phases; give `changed` to `Phases.listen`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._spans = clock, list[Span]()
        self._name: str | None = None
        self._since = 0.0

    def changed(self, name: str | None) -> None:
        """The driver is now in phase `name` (None: in none)."""
        now = self._clock()
        if self._name is not None and now > self._since:
            self._spans.append((self._name, self._since, now))
        self._name, self._since = name, now

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken, self._spans = self._spans, []
        return taken


class BusySpans:
    """When at least one of several things that overlap was under way: `with busy: ...`. For one thread."""

    def __init__(self, name: str, clock: Callable[[], float] = time.time) -> None:
        self._name, self._clock = name, clock
        self._spans: deque[Span] = deque(maxlen=KEPT)
        self._under_way = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if not self._under_way:
            self._since = self._clock()
        self._under_way += 1

    def __exit__(self, *exception: object) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._spans.append((self._name, self._since, self._clock()))

    def take(self) -> list[Span]:
        """The spans since the last call; of one that goes on, what there is of it."""
        if self._under_way:
            now = self._clock()
            self._spans.append((self._name, self._since, now))
            self._since = now
        return [self._spans.popleft() for _ in range(len(self._spans))]


def by_process(driver: Sequence[Span], groups: Mapping[str, Sequence[Sequence[Span]]]) -> dict[str, list[list[Any]]]:
    """The driver's spans and those of each group's ranks, under names such as `driver` and `policy 0`."""
    rows = {DRIVER: driver, **{f"{g} {r}": s for g, ranks in groups.items() for r, s in enumerate(ranks[:TRACED_RANKS])}}
    return {
        who: [[name, round(begin, 4), round(end, 4)] for name, begin, end in spans if end - begin >= SHORTEST_S]
        for who, spans in rows.items()
        if spans
    }


def with_memory_curve(trace: Mapping[str, Any]) -> dict[str, Any]:
    """A trace of torch's profiler with its notes of allocations as a curve too: bytes that are in use, by time."""
    events = trace["traceEvents"]
    curve = [
        {"ph": "C", "name": "memory", **{key: event[key] for key in ("pid", "tid", "ts")}, "args": {"bytes": total}}
        for event in events
        if event["name"] == "[memory]" and (total := event["args"]["Total Allocated"]) >= 0
    ]
    return {**trace, "traceEvents": [*events, *curve]}


def chrome_trace(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of `trace.jsonl` in the Trace Event Format, one process per group and one thread per rank; times in µs."""
    processes: dict[str, int] = {}
    places: dict[str, dict[str, int]] = {}
    events: list[dict[str, Any]] = []
    began = min((span[1] for row in steps for spans in row["spans"].values() for span in spans), default=0.0)
    for row in steps:
        for who, spans in row["spans"].items():
            group, _, rank = who.partition(" ")
            pid = processes.setdefault(group, len(processes) + 1)
            if who not in places:
                places[who] = {"pid": pid, "tid": int(rank or 0) + 1}  # thread 0 is the idle one to some readers
                for kind, name in (("process_name", group), ("thread_name", f"rank {rank}" if rank else group)):
                    events.append({"ph": "M", "name": kind, **places[who], "args": {"name": name}})
            for what, begin, end in spans:
                times = {"ts": round((begin - began) * 1e6), "dur": round((end - begin) * 1e6)}
                events.append({"ph": "X", "name": what, "cat": "phase", **places[who], **times, "args": {"step": row["step"]}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
