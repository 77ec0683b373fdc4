"""Timelines hold what ran when, and read as Chrome's trace format; distributions count every value once."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from megarl.observe import Phases, distributions
from megarl.observe.distributions import histogram
from megarl.observe.trace import BusySpans, PhaseSpans, by_process, chrome_trace, take_spans, timed, with_memory_curve
from tests.observe.trace_format import check_trace_events


class Clock:
    """A clock that moves only when told."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nested_phases_are_spans_that_do_not_overlap() -> None:
    clock = Clock()
    phases, spans = Phases(clock), PhaseSpans(clock)
    phases.listen(spans.changed)
    with phases.step(), phases("generate"):
        clock.now_s += 3
        with phases("sync"):
            clock.now_s += 2
        clock.now_s += 1
    clock.now_s += 5
    assert spans.take() == [("generate", 100, 103), ("sync", 103, 105), ("generate", 105, 106)]
    assert spans.take() == []


@timed("work", "fail")
class Worker:
    """Works, fails, and answers without being timed."""

    def work(self, amount: int) -> int:
        """Docstring that must stay."""
        return amount * 2

    def fail(self) -> None:
        raise ValueError("as asked")

    def ask(self) -> int:
        return 1


def test_calls_are_timed_whether_they_return_or_raise() -> None:
    worker, other = Worker(), Worker()
    assert worker.work(2) == 4
    with pytest.raises(ValueError, match="as asked"):
        worker.fail()
    worker.ask()
    spans = take_spans(worker)
    assert [name for name, _, _ in spans] == ["work", "fail"]
    assert all(begin <= end for _, begin, end in spans)
    assert spans[0][2] <= spans[1][1]
    assert take_spans(worker) == take_spans(other) == []
    assert Worker.work.__doc__ == "Docstring that must stay."


def test_what_overlaps_is_one_span_and_is_cut_where_it_is_asked_for() -> None:
    clock = Clock()
    busy = BusySpans("generate", clock)
    with busy:
        clock.now_s += 1
        with busy:
            clock.now_s += 2
        clock.now_s += 3
        assert busy.take() == [("generate", 100, 106)]
        clock.now_s += 1
    clock.now_s += 10
    with busy:
        clock.now_s += 1
    assert busy.take() == [("generate", 106, 107), ("generate", 117, 118)]
    assert busy.take() == []


def test_a_chrome_trace_has_a_process_per_group_and_microseconds_since_the_first_span() -> None:
    spans = by_process([("generate", 10.0, 11.5)], {"policy": [[("update", 11.5, 12.0)], [("update", 11.5, 12.25)]]})
    assert spans["policy 1"] == [["update", 11.5, 12.25]]
    events = chrome_trace([{"step": 1, "spans": spans}])["traceEvents"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): f"{groups[e['pid']]}/{e['args']['name']}" for e in events if e["name"] == "thread_name"}
    found = [(names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert found == [
        ("driver/driver", "generate", 0, 1_500_000, {"step": 1}),
        ("policy/rank 0", "update", 1_500_000, 500_000, {"step": 1}),
        ("policy/rank 1", "update", 1_500_000, 750_000, {"step": 1}),
    ]


def test_a_chrome_trace_keeps_to_the_format() -> None:
    times = np.cumsum(np.random.default_rng(0).exponential(0.01, 2000)) + 1.79e9
    spans = [("update", begin, end) for begin, end in pairwise(times.tolist())]  # each begins where the one before ends
    rows = [{"step": 1, "spans": by_process(spans, {"policy": [spans, spans], "engine": [[]]})}]
    check_trace_events(json.dumps(chrome_trace(rows)))
    crossing = [[("a", 10.0, 12.0), ("b", 11.0, 13.0)]]
    with pytest.raises(AssertionError, match="crosses"):
        check_trace_events(json.dumps(chrome_trace([{"step": 1, "spans": by_process([], {"policy": crossing})}])))


def test_the_notes_of_a_profiler_become_a_curve_of_the_memory_in_use() -> None:
    place = {"pid": 7, "tid": 8}
    notes = [
        {"ph": "i", "name": "[memory]", **place, "ts": 1.5, "args": {"Bytes": 64, "Total Allocated": 64}},
        {"ph": "X", "name": "aten::mm", **place, "ts": 2.0, "dur": 1.0},
        {"ph": "i", "name": "[memory]", **place, "ts": 2.5, "args": {"Bytes": -64, "Total Allocated": 0}},
    ]
    trace = with_memory_curve({"baseTimeNanoseconds": 3, "traceEvents": notes})
    assert trace["baseTimeNanoseconds"] == 3
    assert trace["traceEvents"][:3] == notes
    assert trace["traceEvents"][3:] == [
        {"ph": "C", "name": "memory", **place, "ts": 1.5, "args": {"bytes": 64}},
        {"ph": "C", "name": "memory", **place, "ts": 2.5, "args": {"bytes": 0}},
    ]


def test_histograms_agree_with_numpy() -> None:
    values = np.random.default_rng(0).normal(size=500)
    found = histogram(values.tolist())
    counts, edges = np.histogram(values, bins=20)
    assert found["counts"] == counts.tolist()
    assert (found["low"], found["high"]) == (edges[0], edges[-1])
    assert histogram([3.0, 3.0, float("nan")]) == {"low": 3.0, "high": 3.0, "counts": [2]}
    assert histogram([]) == {"low": 0.0, "high": 0.0, "counts": []}


def test_group_spread_is_within_groups() -> None:
    found = distributions([1, 2, 3, 4], [0.0, 1.0, 5.0, 5.0], [0, 0, 1, 1], [0, 0, 0, 2])
    assert (found["group_std"]["low"], found["group_std"]["high"]) == (0.0, 0.5)
    assert sum(found["group_std"]["counts"]) == 2
    assert sum(found["staleness"]["counts"]) == 4
