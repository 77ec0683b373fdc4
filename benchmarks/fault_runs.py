"""The runs of `faults.py`: their configs, their server of rewards, and a run that is watched from outside.

Ranks and engines are forked from a process that has imported what they need (`tests/warm_workers.py`): a start takes seconds
instead of tens of them, and nothing else of a run is changed. Runs over two nodes, which are network namespaces of this
machine, start theirs as Ray does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from workload import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.themes.multinode import ray_nodes  # noqa: E402
from tests.themes.multinode.namespaces import Network  # noqa: E402
from tests.themes.multinode.ray_nodes import RayNodes  # noqa: E402
from tests.warm_workers import WarmWorkers  # noqa: E402

LEFT_S = 20.0
"""How long processes may take to end after the run."""
MEGARL = (sys.executable, "-m", "megarl")


def config(folder: Path, reward_port: int, steps: int, family: str) -> dict[str, Any]:
    """The run of a family's trials: two data-parallel ranks, an engine, rewards over HTTP, a checkpoint every other step."""
    url = f"http://127.0.0.1:{reward_port}/get_reward"
    tree: dict[str, Any] = {
        "run": {"folder": str(folder), "steps": steps, "save_every": 2, "resume": "auto", "max_restarts": 5}
        | {"log_samples": 10_000, "export": True, "seed": 1},
        "model": {"path": str(ROOT / "models/tiny-arithmetic"), "dtype": "float32"},
        "policy": {"layout": {"dp": 2}, "threads_per_rank": 1, "max_tokens_per_micro_batch": 1024, "optimizer": {"lr": 5e-4}},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
        "data": {"train": {"source": "python", "name": f"{folder / 'sums.py'}:sums"}}
        | {"chat_template": "never", "max_prompt_tokens": 8},
        "rollout": {"engine": "embedded", "prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 4, "threads": 1}
        | {"deadlines": {"generate_s": 20, "update_s": 20}},
        "resources": {"deadlines": {"start_s": 120, "step_s": 20, "save_s": 60}},
        "rewards": [{"name": "http", "args": {"url": url, "timeout_s": 5, "retries": 7}}],
    }
    if family == "adapters":
        tree["policy"]["lora"] = {"rank": 4}
    if family == "agents":
        agent = {"function": str(ROOT / "examples/agents/calculator_agent.py:solve"), "processes": 1, "timeout_s": 15}
        task = {"source": "python", "name": str(ROOT / "examples/tools/calculator.py:word_problems")}
        tree["model"]["path"] = str(ROOT / "models/tiny-calculator")
        tree["data"] = {"train": task | {"args": {"rows": 400, "seed": 0}}, "max_prompt_tokens": 48}
        tree["rollout"] |= {"max_new_tokens": 48, "episode": {"kind": "agent", "max_turns": 3, "agent": agent}}
        tree["rollout"]["deadlines"]["generate_s"] = tree["resources"]["deadlines"]["step_s"] = 45
    if family == "pictures":
        tree["model"]["path"] = str(ROOT / "models/tiny-vision")
        source = {"source": "python", "name": str(ROOT / "examples/vision/shapes.py:count_shapes"), "args": {"rows": 400}}
        tree["data"] |= {"train": source, "prompt_key": "problem", "max_prompt_tokens": 32}
        tree["policy"]["max_tokens_per_micro_batch"] = 2048
    if family == "asynchronous":
        tree["rollout"]["schedule"] = {"mode": "async"}
    if family in SPARED:
        tree["resources"] |= {"placement": "separate", "spares": 1, "compare_replicas": 1}
    if family == "spares":
        tree["policy"]["layout"], tree["resources"]["spares"] = {"tp": 2, "dp": 2}, 2
    if family == "coming_engines":
        tree["rollout"] |= {"engine": f"{ROOT / 'tests/themes/e2e/slow_lent_engine.py'}:SlowEngine", "max_new_tokens": 16}
        tree["rollout"] |= {"engines": {"min": 1, "max": 2}, "schedule": {"mode": "async"}}
        tree["policy"]["layout"], tree["resources"]["placement"] = {"dp": 1}, "separate"
    if family == "nodes":
        tree["rollout"]["engines"] = 2
    if family in NODES:
        tree["rewards"] = [{"name": "exact_number"}]
        tree["resources"]["deadlines"]["start_s"] = 240
    return tree


NODES = {
    "nodes": (2, {"cpus": 1}),
    "spare_nodes": (5, {"cpus": 1, "head_cpus": 0}),
    "coming_engines": (4, {"cpus": 1, "head_cpus": 0, "later": 1}),
}
"""Of families over nodes: how many, and what `RayNodes` is told of them."""
SPARED = ("spares", "spare_nodes")
"""Families whose lost ranks are replaced from memory."""


FAMILIES = {
    "plain": "answers in one turn",
    "agents": "episodes in which the agent of `examples/agents` acts: turns over its endpoint, calls of a tool",
    "adapters": "adapters are trained (LoRA), and they alone are sent to the engine",
    "pictures": "every prompt has a picture, which the engine and the ranks see",
    "asynchronous": "`rollout.schedule.mode: async`: the engine goes on while ranks train, and gets weights in mid-response",
    "nodes": "a rank and an engine on each of two nodes: network namespaces that see each other by TCP alone, under one Ray",
    "spares": "`resources.spares: 2` and `compare_replicas: 1`, tp 2 x dp 2: lost ranks are replaced from memory",
    "spare_nodes": "the same over five such nodes: two with a rank, one with the engine, a spare one, and the driver's",
    "coming_engines": "`rollout.engines: {min: 1, max: 2}`, asynchronous, over four such nodes, one of which comes later",
}
"""What runs are made of."""

SUMS = """
import random


def sums():
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(400)]
    return [{"question": f"Calculate {a} + {b}.", "answer": str(a + b)} for a, b in pairs]
"""
"""The rows of runs without agents: a library of tasks would take seconds to import."""

Outcome = tuple[list[tuple[Any, ...]], str]
"""What was trained on, in order: (step, group, prompt, response) of every sample; and a hash of the final weights."""

Records = tuple[list[tuple[Any, ...]], Counter[int], list[str]]
"""Step, reward and loss of every row of metrics.jsonl; events of trace.jsonl by step; the checkpoints."""

SLOW = """
import time


def nothing(samples):
    time.sleep(0.1)
    return [0.0] * len(samples)
"""
"""A source of the server's that adds nothing to a reward but time, in which its connection can be cut."""


def last_step(run: Path) -> int:
    """The step of the last whole line of a run's metrics.jsonl; 0: none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(json.loads((run / "metrics.jsonl").read_text().split("\n")[-2])["step"])
    return 0


class RewardServer:
    """`megarl serve-reward` on a port of its own; `see_to` starts it again when it is gone, as a service manager would."""

    def __init__(self, folder: Path, name: str) -> None:
        self.port = free_port()
        self._config = folder / f"{name}.yaml"
        slow = folder / f"{name}_takes_its_time.py"
        slow.write_text(SLOW)
        (folder / "sums.py").write_text(SUMS)
        tree = config(folder, self.port, 1, "plain") | {"rewards": [{"name": "exact_number"}, {"name": f"{slow}:nothing"}]}
        self._config.write_text(yaml.safe_dump(tree))
        self._log = (folder / f"{name}.log").open("ab")
        self.process = self._start()
        self._wait()

    def see_to(self) -> None:
        """Start it again if it has ended."""
        if self.process.poll() is not None:
            self.process = self._start()

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(10)
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*MEGARL, "serve-reward", str(self._config), "--port", str(self.port)]
        return subprocess.Popen(command, env=environment(ROOT), stdout=self._log, stderr=self._log)

    def _wait(self) -> None:
        ends_at = time.monotonic() + 120
        while time.monotonic() < ends_at:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.2)
        raise SystemExit("the reward server did not start")


CLOCK = """
import sys
import threading
import time

_FOLDER, _TIME, _TIME_NS = {folder!r}, time.time, time.time_ns


def _jumped_s():
    try:
        with open(_FOLDER + "/jump") as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


time.time = lambda: _TIME() + _jumped_s()
time.time_ns = lambda: _TIME_NS() + _jumped_s() * 10**9
"""
"""A `sitecustomize.py`: from when the file `jump` beside it has a number of seconds in it, the clock is ahead by so much."""

FLIP = """


def _flip():
    import gc
    import os

    ours = str(os.getpid())
    while True:
        time.sleep(0.1)
        try:
            with open(_FOLDER + "/flip") as file:
                if file.read() != ours:
                    continue
        except FileNotFoundError:
            continue
        import torch

        for model in gc.get_objects():
            if type(model).__name__ == "RankModel":
                weight = next(model.chunks[0].parameters())
                weight.data.view(torch.int32).view(-1)[3] ^= 1 << 20
                os.unlink(_FOLDER + "/flip")
                with open(_FOLDER + "/flipped", "w") as file:
                    file.write("bit 20 of a weight")
                return


if "default_worker.py" in " ".join(sys.orig_argv):
    threading.Thread(target=_flip, daemon=True).start()
"""
"""More of it: the process whose id the file `flip` holds turns a bit of a weight over, and says so in `flipped`."""


def environment(*folders: Path) -> dict[str, str]:
    """This process's environment, `folders` first on Python's path, without what would make a run join another one's Ray."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), own.get("PYTHONPATH", "")]))}


@dataclass
class Place:
    """What one run after the other is made with: a server of rewards, and one that its ranks and engines are forked from."""

    folder: Path
    reward: RewardServer
    workers: WarmWorkers


class Run:
    """`megarl train` on a family's config, watched from outside."""

    def __init__(self, name: str, place: Place, family: str, steps: int, *, is_forked: bool = True) -> None:
        """`is_forked`: its ranks and engines are; else each is a Python of its own."""
        self._stack = contextlib.ExitStack()
        self.nodes: RayNodes | None = None
        self.folder, self.steps, self.family, self.reward = place.folder / name, steps, family, place.reward
        self._workers = place.workers if is_forked else None
        shutil.rmtree(self.folder, ignore_errors=True)  # of a trial that was interrupted
        self.folder.mkdir(parents=True)
        self._config = self.folder / "run.yaml"
        self.clock = self.folder / "clock"
        self.clock.mkdir()
        (self.clock / "sitecustomize.py").write_text(CLOCK.format(folder=str(self.clock)) + FLIP)
        tree = config(place.folder, self.reward.port, steps, family)
        tree["run"]["name"] = name
        if family in NODES:
            count, resources = NODES[family]
            network = self._stack.enter_context(Network(count))
            self.nodes = self._stack.enter_context(RayNodes(network, self.folder, gpus=0, **resources))
            tree["resources"]["ray_address"] = self.nodes.address
            self._workers = None
        self._config.write_text(yaml.safe_dump(tree))
        self.output = (self.folder / "output.log").open("ab")
        self.seen: dict[int, psutil.Process] = {}
        self._cpu_s: dict[int, float] = {}
        self.start()

    def start(self) -> None:
        """Start the command; a second time after it was killed."""
        command = [*MEGARL, "train", str(self._config)]
        if self.nodes is not None:
            command, environ = self.nodes.network.nodes[0].command(*command), ray_nodes.environment()
        else:
            environ = environment(self.clock, ROOT) | (self._workers.environment if self._workers is not None else {})
        self.process = subprocess.Popen(command, env=environ, stdout=self.output, stderr=self.output)

    def rival(self) -> subprocess.Popen[bytes]:
        """The same command once more, beside the run, with its output in a pipe."""
        environ = environment(self.clock, ROOT) | (self._workers.environment if self._workers is not None else {})
        command = [*MEGARL, "train", str(self._config)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    @property
    def last_step(self) -> int:
        """See the function."""
        return last_step(self.folder)

    def find(self, target: str, draw: random.Random) -> psutil.Process | None:
        """A process of that kind that runs now."""
        if target == "rival":
            return psutil.Process(self.process.pid) if (self.folder / "owner.json").exists() else None
        if target == "reward_server":
            return psutil.Process(self.reward.process.pid) if self.reward.process.poll() is None else None
        if target in ("supervisor", "clock"):
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        if self.nodes is not None and target in ("node", "nodes", "link"):
            return self.nodes.process(draw.choice([number for number in self.nodes.started if number]))
        found = []
        for process in self.below():
            with contextlib.suppress(psutil.Error):
                line, own_child = " ".join(process.cmdline()), process.ppid() == self.process.pid
                is_it = {
                    "driver": own_child and " train " in line,
                    "rank": "ray::RankProcess" in line,
                    "ranks": "ray::RankProcess" in line,
                    "weight": "ray::RankProcess" in line,
                    "engine": "ray::EngineActor" in line,
                    "agent": "agent_process.py" in line,
                    "ray": "/ray/" in line or "ray::DashboardAgent" in line or "ray::RuntimeEnvAgent" in line,
                }
                if is_it[target]:
                    found.append(process)
        return draw.choice(sorted(found, key=lambda process: process.pid)) if found else None

    def below(self) -> list[psutil.Process]:
        """All processes of the run now; remembered, to see afterwards whether any is left."""
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.process.pid).children(recursive=True)
            found += self._elsewhere()
            self.seen |= {process.pid: process for process in found}
            for process in found:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self._cpu_s[process.pid] = times.user + times.system
            return found
        return []

    def _elsewhere(self) -> list[psutil.Process]:
        """Its processes that are not below the command."""
        forked = self._workers.forked if self._workers is not None else []
        return forked + (list(self.nodes.workers()) if self.nodes is not None else [])

    def see_to(self) -> None:
        """Start what has ended and a machine's own service manager would start again: the server of rewards, Ray on a node."""
        self.reward.see_to()
        for number in self.nodes.gone if self.nodes is not None else []:
            self.nodes.start(number)

    @property
    def cpu_s(self) -> float:
        """Seconds of a core that its processes have taken, as far as `below` has seen."""
        return sum(self._cpu_s.values())

    def left(self) -> list[str]:
        """Processes of the run that are still there some time after it has ended."""
        ends_at = time.monotonic() + LEFT_S
        while True:
            alive = []
            elsewhere = {one.pid: one for one in self._elsewhere()}
            for process in (self.seen | elsewhere).values():
                with contextlib.suppress(psutil.Error):
                    if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                        alive.append(f"{process.pid} {process.name()}")
            if not alive or time.monotonic() > ends_at:
                return alive
            time.sleep(0.5)

    def end(self) -> None:
        """End whatever is left of it."""
        for process in [*self.seen.values(), *([psutil.Process(self.process.pid)] if self.process.poll() is None else [])]:
            with contextlib.suppress(psutil.Error):
                if process.is_running():
                    process.kill()
        self._stack.close()
        self.output.close()

    def outcome(self) -> Outcome:
        """What it came to."""
        rows = [json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()]
        samples = [(row["step"], row["group_id"], tuple(row["prompt_ids"]), tuple(row["response_ids"])) for row in rows]
        weights = sorted((self.folder / "model").glob("*.safetensors"))
        return samples, hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest()

    def records(self) -> Records:
        """What its other files say of it."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        metrics = [(row["step"], row.get("reward/mean"), row.get("policy/loss")) for row in rows]
        events = [json.loads(line) for line in (self.folder / "trace.jsonl").read_text().splitlines()]
        checkpoints = sorted(path.name for path in (self.folder / "checkpoints").iterdir())
        return metrics, Counter(event.get("step", 0) for event in events), checkpoints
