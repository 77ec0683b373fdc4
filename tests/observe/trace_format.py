"""What the Trace Event Format asks of a file that Perfetto and chrome://tracing shall show whole."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any


def check_trace_events(text: str) -> None:
    """Fails where an event lacks a field, has one of another kind, or where the spans of a thread cross.

    Readers put spans of a thread into one another by their times, and drop or cut those that begin in one span and end
    after it.
    """
    events = json.loads(text)["traceEvents"]
    spans = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) and event[key] > 0 for key in ("pid", "tid")), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["ph"] == "X"
            assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "dur")), event
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for of_thread in spans.values():
        check_nesting(of_thread)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert spans.keys() == named


def check_nesting(spans: list[Any]) -> None:
    """Any two of (begin, end) are apart or one is inside the other."""
    around: list[Any] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] <= begin:
            around.pop()
        assert not around or end <= around[-1], f"a span from {begin} to {end} crosses the end of another at {around[-1]}"
        around.append(end)
