"""A run is watched while it goes on: what is scraped is what it writes, and an engine that is killed is seen to be down."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.options.telemetry.endpoint import targets_file
from megarl.options.telemetry.prometheus import prometheus_name
from megarl.trainers.rl.train import train
from tests.observe.collector import Collector
from tests.themes.e2e.processes import start_megarl
from tests.themes.e2e.test_faults import called
from tests.warm_workers import WarmWorkers

DEADLINE_S = 240
Series = dict[tuple[str, ...], float]


def free_port() -> int:
    """A port that the kernel gives to nobody who connects: one of those would connect to itself while nobody listens."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(low // 2, low)
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def scrape(port: int) -> Series | None:
    """By name and values of labels without the run's; None while nobody listens."""
    try:
        status, text = ask(port, "/metrics")
    except (OSError, http.client.HTTPException):
        return None
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(one.name, *(one.labels[key] for key in sorted(one.labels) if key != "run")): one.value for one in samples}


class Watcher:
    """Scrapes, and holds each scrape against the row of its step in metrics.jsonl."""

    def __init__(self, port: int, folder: Path, is_over: Callable[[], bool]) -> None:
        self.port, self.folder, self.is_over = port, folder, is_over
        self.compared = set[int]()

    def until(self, seen: Callable[[Series], bool]) -> Series:
        """The first scrape of which `seen` is true; AssertionError if the run is over before."""
        ends_at = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < ends_at
            was_over = self.is_over()
            found = scrape(self.port)
            if found is not None:
                self.compare(found)
                if seen(found):
                    return found
            assert not was_over, "the run is over"
            time.sleep(0.01)

    def compare(self, found: Series) -> None:
        step = found[("megarl_run_step",)]
        rows = [row for row in read_metrics(self.folder / "metrics.jsonl") if row["step"] == step]
        if not rows or ("megarl_reward_mean",) not in found:  # of an attempt that has done no step yet
            return
        expected = {name: value for name, value in rows[-1].items() if name != "step"}
        assert len(expected) > 40
        for name, value in expected.items():
            served = found[(prometheus_name(name),)]
            assert served == value or (math.isnan(served) and math.isnan(value)), name
        self.compared.add(int(step))


def check_engine_killed(watcher: Watcher, kill: Callable[[], None]) -> None:
    """Look at a run that is well, kill its engine, and look at it until the engine is back."""
    watcher.until(lambda found: found.get(("megarl_run_phase", "start")) == 1)
    calm = watcher.until(lambda found: found[("megarl_run_step",)] >= 2 and ("megarl_run_checkpoint_step",) in found)
    assert calm[("megarl_engine_up", "0")] == 1
    assert calm[("megarl_engine_weight_version", "0")] >= 1
    assert [calm[("megarl_ranks", "policy", state)] for state in ("up", "silent", "gone")] == [2, 0, 0]
    assert calm[("megarl_run_guards_applied_total", "stop if reward/mean above 5")] == 0
    assert sum(value for name, value in calm.items() if name[0] == "megarl_run_phase") <= 1
    assert 0 < calm[("megarl_run_checkpoint_step",)] <= calm[("megarl_run_step",)] + 1
    status, text = ask(watcher.port, "/health")
    assert (status, json.loads(text)["run"]) == (200, "watched")

    kill()
    down = watcher.until(lambda found: found[("megarl_engine_up", "0")] == 0)
    assert down[("megarl_engine_state", "0", "restarting")] == 1
    assert down[("megarl_engine_failures_total", "0")] == 1
    assert ("megarl_engine_weight_version", "0") not in down
    back = watcher.until(lambda found: found[("megarl_engine_state", "0", "up")] == 1)
    watcher.until(lambda found: found[("megarl_run_step",)] > back[("megarl_run_step",)])
    assert len(watcher.compared) >= 3


def settings(port: int, steps: int) -> dict[str, Any]:
    return {
        "run.name": "watched",
        "run.steps": steps,
        "run.save_every": 1,
        "run.guards": [{"metric": "reward/mean", "above": 5.0, "action": "stop"}],
        "data.eval": None,
        "algorithm.kl.coef": 0.0,
        "policy.layout.dp": 2,
        "rollout.threads": 1,
        "trackers.prometheus.port": port,
    }


def sent_spans(collector: Collector) -> set[tuple[int, str, str, float, float]]:
    """Step, process, name, begin and end of every span that the collector got but the steps' own."""
    found = set()
    for span in collector.spans():
        if (process := span.attributes.get("megarl.process")) is not None:
            who = process if process == "driver" else f"{process} {span.attributes['megarl.rank']}"
            found.add((span.attributes["megarl.step"], who, span.name, round(span.begin_s, 4), round(span.end_s, 4)))
    return found


@pytest.mark.slow
def test_a_run_is_seen_as_it_is_and_a_killed_engine_as_down(
    tiny_config: Callable[..., Config], local_ray: None, warm_workers: WarmWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, strangers = free_port(), warm_workers.forked
    config = tiny_config(**settings(port, steps=12), **{"trackers.opentelemetry": True})
    is_over = threading.Event()
    watcher = Watcher(port, Path(config.run_folder), is_over.is_set)

    def kill() -> None:
        called("ray::EngineActor", [process for process in warm_workers.forked if process not in strangers]).kill()

    with Collector() as collector, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        watching = pool.submit(check_engine_killed, watcher, kill)
        try:
            train(config)
        finally:
            is_over.set()
        watching.result()
    assert scrape(port) is None
    rows = read_metrics(Path(config.run_folder) / "trace.jsonl")
    written = {(row["step"], who, *span) for row in rows for who, spans in row["spans"].items() for span in spans}
    assert {"driver", "policy 0", "policy 1", "engine 0"} == {who for _, who, *_ in written}
    assert sent_spans(collector) == written
    assert not targets_file(config).exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_is_started_again_is_at_the_same_port(
    tiny_config: Callable[..., Config], warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    port, strangers = free_port(), warm_workers.forked
    config = tiny_config(**settings(port, steps=500))  # it is told to stop
    (tmp_path / "watched.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    run = start_megarl("train", str(tmp_path / "watched.yaml"), environment=warm_workers.environment)
    folder = Path(config.run_folder)
    watcher = Watcher(port, folder, lambda: run.poll() is not None)

    def kill() -> None:
        called("ray::EngineActor", [process for process in warm_workers.forked if process not in strangers]).kill()

    try:
        check_engine_killed(watcher, kill)
        assert json.loads(targets_file(config).read_text())[0]["targets"] == [f"127.0.0.1:{port}"]
        called("megarl train", psutil.Process(run.pid).children()).kill()
        again = watcher.until(lambda found: found[("megarl_run_restarts_total",)] == 1)
        watcher.until(lambda found: found[("megarl_run_step",)] >= again[("megarl_run_step",)] + 2)
        run.terminate()
        _, said = run.communicate(timeout=DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            run.kill()
    assert run.returncode == 75, said
    assert scrape(port) is None
    assert not targets_file(config).exists()
