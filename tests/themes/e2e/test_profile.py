"""`profile.steps`: traces of the steps that were asked for and of no others, in a run that computes what it would without."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from megarl.config import Config
from megarl.observe.run_record import read_run
from megarl.observe.trace import chrome_trace
from megarl.trainers.rl.train import train
from tests.observe.trace_format import check_trace_events

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_profiled_step_is_traced_and_computes_the_same(tiny_config: Callable[..., Config]) -> None:
    shared = {"run.steps": 3, "run.export": True, "data.eval": None, "policy.layout": {"tp": 2}, "algorithm.mini_batches": 2}
    plain = tiny_config(**shared)
    train(plain)
    profiled = tiny_config(**shared, **{"run.name": "profiled", "profile": {"steps": [2], "ranks": [1]}})
    train(profiled)

    assert results(profiled) == results(plain)
    run = read_run(profiled.run_folder)
    assert run.profiles == ("profile/step_000002/policy-1.trace.json.gz",)
    assert read_run(plain.run_folder).profiles == ()
    with gzip.open(Path(profiled.run_folder, *run.profiles), "rt") as file:
        trace = json.load(file)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in events:
        assert {"name", "pid", "tid", "ts", "dur"} <= event.keys()
    passes = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert passes["forward policy"] == 1  # a pass for the old log-probs
    assert passes["forward reference"] == 1
    assert passes["update policy"] == 2  # one for each mini-batch
    names = {event["name"] for event in events}
    assert {"aten::mm", "gloo:all_reduce"} <= names
    assert any("ColumnParallel" in name or "LinearWithGradAccumulation" in name for name in names), sorted(names)[:300]
    check_trace_events(json.dumps(chrome_trace(run.trace)))
    began, ended = spanned(run.trace, 2)
    times = [trace["baseTimeNanoseconds"] / 1e9 + event["ts"] / 1e6 for event in events if event["name"].startswith("aten::")]
    assert began - 0.1 < min(times)
    assert max(times) < ended + 0.1
    memory = [event["args"]["bytes"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert len(memory) > 100
    assert max(memory) > 0


def results(config: Config) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What was sampled and made of it, and the weights at the end."""
    samples = [json.loads(line) for line in Path(config.run_folder, "samples.jsonl").read_text().splitlines()]
    weights = {name: value.tolist() for name, value in load_file(Path(config.run_folder, "model/model.safetensors")).items()}
    return samples, weights


def spanned(trace: Any, step: int) -> tuple[float, float]:
    """When the step's first span began and its last one ended, in seconds since the epoch."""
    spans = [span for row in trace if row["step"] == step for spans in row["spans"].values() for span in spans]
    return min(begin for _, begin, _ in spans), max(end for _, _, end in spans)
