"""Two network namespaces stand for two sites: an engine of the second joins and leaves a run in the first, over TCP alone.

What the sites know of each other is a URL and a token. The folder of the model stands for a copy at either site.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.themes.multinode.conftest import two_nodes
from tests.themes.multinode.namespaces import Network
from tests.themes.multinode.patient import __file__ as reward_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
pytest.importorskip("megarl.options.elastic_engines")
pytest.importorskip("zstandard")
TOKEN = "the-token-of-two-sites"
WAIT_S, STEP_S, TURN_S, MOST_STEPS = 600.0, 10.0, 0.4, 2000
PORT = 8480


@pytest.fixture
def sites() -> Iterator[Network]:
    """Networks of two sites; their cable is pulled in tests."""
    yield from two_nodes()


class TwoSites:
    """A run in the first site; engines of the second, one at a time."""

    def __init__(self, network: Network, folder: Path, model: Path, steps: int) -> None:
        self.network, self.folder, self.model = network, folder, model
        self.run_folder = folder / "runs" / "two-sites"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
        self.environment |= {"MEGARL_SITES_TOKEN": TOKEN}
        self.joined: list[tuple[subprocess.Popen[str], Path]] = []
        self.run, self.said_in = self.start("two-sites", steps, {"host": network.nodes[0].address, "port": PORT})

    def start(self, name: str, steps: int, at: dict[str, Any] | None) -> tuple[subprocess.Popen[str], Path]:
        """Start a run: two CPU places, for its rank and for its own engine."""
        config, said_in = self.folder / f"{name}.yaml", self.folder / f"{name}.txt"
        config.write_text(yaml.safe_dump(tree(self.folder, self.model, name, steps, at)))
        return self._start(0, said_in, "train", str(config)), said_in

    def _start(self, site: int, said_in: Path, *words: str) -> subprocess.Popen[str]:
        with said_in.open("w") as said:
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))  # room for the rank and one engine
            command = ["taskset", "--cpu-list", cores, sys.executable, "-m", "megarl", *words]
            return self.network.nodes[site].start(*command, env=self.environment, stdout=said, stderr=subprocess.STDOUT)

    def join(self) -> None:
        """Start an engine in the second site, and wait until it samples."""
        said_in = self.folder / f"site-{len(self.joined)}.txt"
        url = f"http://{self.network.nodes[0].address}:{PORT}"
        words = ["node", "join", url, "--model", str(self.model), "--name", f"site-{len(self.joined)}"]
        self.joined.append((self._start(1, said_in, *words), said_in))
        self.wait_for(lambda: "checksums equal" in said_in.read_text())

    def have_it_work(self) -> None:
        """Return when two steps more are done, in which the run's own engine computed a twentieth of the time.

        How soon an engine of another site has a step's weights is not the run's to say: on a quiet machine the run's own may
        have sampled everything by then.
        """
        engines = [process for process in psutil.process_iter(["cmdline"]) if "ray::Engine" in str(process.info["cmdline"])]
        [own] = [process for process in engines if self.run.pid in [parent.pid for parent in process.parents()]]
        at = self.step
        while self.step < at + 2:
            assert self.run.poll() is None, self.said
            own.suspend()
            time.sleep(0.95 * TURN_S)
            own.resume()
            time.sleep(0.05 * TURN_S)

    def leave(self) -> str:
        """Have the newest engine leave; returns what it said."""
        process, said_in = self.joined[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, said_in.read_text()
        return said_in.read_text()

    def stop(self) -> int:
        """Have the run save and end; returns the steps that are done."""
        os.kill(self.run.pid, signal.SIGTERM)
        assert self.run.wait(WAIT_S) == 75, self.said
        return self.step

    @property
    def step(self) -> int:
        """Steps that are done."""
        path = self.run_folder / "metrics.jsonl"
        return max([json.loads(line)["step"] for line in path.read_text().splitlines()], default=0) if path.exists() else 0

    def wait_for(self, there: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + WAIT_S
        while not there():
            assert time.monotonic() < ends_at, self.said
            assert self.run.poll() is None, self.said
            time.sleep(0.1)

    @property
    def said(self) -> str:
        """What all processes have said."""
        return "\n".join(path.read_text()[-4000:] for path in [self.said_in, *(path for _, path in self.joined)])

    def close(self) -> None:
        for process in [self.run, *(process for process, _ in self.joined)]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def tree(folder: Path, model: Path, name: str, steps: int, at: dict[str, Any] | None) -> dict[str, Any]:
    """A run in step with its samples, whose numbers do not depend on who sampled them.

    Six requests a step, of which an engine is sent two at a time: some are left when the other site has the weights.
    """
    task = {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}
    task["args"] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return {
        "run": {"name": name, "folder": str(folder / "runs"), "steps": steps, "log_samples": 1000},
        "model": {"path": str(model), "dtype": "float32"},
        "policy": {"max_tokens_per_micro_batch": 512, "threads_per_rank": 1, "optimizer": {"lr": 1e-3}},
        "algorithm": {"kl": {"coef": 0.0}},
        "data": {"train": task, "max_prompt_tokens": 96},
        "rollout": {
            "engine": "embedded", "engines": {"min": 1, "max": 2}, "sites": at, "threads": 1,
            "prompts_per_step": 12, "samples_per_prompt": 32, "max_new_tokens": 16, "ignore_eos": True,
        },
        "rewards": [{"name": f"{Path(reward_file)}:share_of_digits"}],
        "resources": {"placement": "separate"},
    }  # fmt: skip


def learned(folder: Path) -> list[tuple[Any, ...]]:
    """Every response that was trained on with its numbers: with those of step n, what step n - 1 has learned."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    rows = [(s["step"], s["sample_id"], s["response_ids"], s["rollout_log_probs"], s["weight_versions"]) for s in samples]
    return sorted(rows, key=lambda row: row[:2])


def come_and_go(network: Network, folder: Path, model: Path, times: int) -> None:
    two = TwoSites(network, folder, model, MOST_STEPS)
    try:
        for _ in range(times):
            at = two.step
            two.wait_for(lambda at=at: two.step > at)  # type: ignore[misc]
            two.join()
            two.have_it_work()
            said = two.leave()
            [answered] = re.findall(r"(\d+) requests? answered", said)
            assert int(answered) > 0, said
            assert "as differences from version" in said
        steps = two.stop()
        alone, said_in = two.start("alone", steps, None)
        two.joined.append((alone, said_in))
        assert alone.wait(steps * STEP_S + WAIT_S) == 0, said_in.read_text()
        with_sites, without = learned(two.run_folder), learned(folder / "runs" / "alone")
        assert len(with_sites) > 300
        assert [row for row in with_sites if row[0] < steps] == [row for row in without if row[0] < steps]
    finally:
        two.close()


def test_an_engine_of_another_site_joins_and_leaves_twice_in_a_run_that_learns_as_without(
    sites: Network, tiny_model: Path, tmp_path: Path
) -> None:
    come_and_go(sites, tmp_path, tiny_model, 2)


@pytest.mark.exhaustive  # the test above, ten times
def test_an_engine_of_another_site_joins_and_leaves_ten_times_in_a_run_that_learns_as_without(
    sites: Network, tiny_model: Path, tmp_path: Path
) -> None:
    come_and_go(sites, tmp_path, tiny_model, 10)


def test_a_run_goes_on_while_the_network_between_sites_is_cut_and_the_engine_joins_again(
    sites: Network, tiny_model: Path, tmp_path: Path
) -> None:
    two = TwoSites(sites, tmp_path, tiny_model, MOST_STEPS)
    try:
        two.wait_for(lambda: two.step > 0)
        two.join()
        [(_, said_in)] = two.joined
        sites.connect(2, is_up=False)
        two.wait_for(lambda: "was not heard of" in two.said_in.read_text())
        at = two.step
        two.wait_for(lambda: two.step > at + 1)
        sites.connect(2, is_up=True)
        two.wait_for(lambda: said_in.read_text().count("joined as engine") == 2)
        two.wait_for(lambda: two.said_in.read_text().count("came from site-0") == 2)
        two.leave()
        two.stop()
    finally:
        two.close()
    samples = learned(two.run_folder)
    assert len({row[:2] for row in samples}) == len(samples), "no response was trained on twice"
