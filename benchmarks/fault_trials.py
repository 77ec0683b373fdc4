"""One trial of `faults.py`: a tiny run in processes of its own, one of which is killed, stopped, held up or cut off.

What is hit is found below the `megarl train` process by what it calls itself. Linux, rights to trace the own processes, and for
`oom` to make memory cgroups.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from megarl.system.atomic_files import write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
PAUSE_S = (1.0, 4.0)
"""How long a process is held up that goes on afterwards."""
TRIAL_S = 1200.0
LOOK_S = 3.0
LEFT_S = 20.0
"""How long processes may take to end after the run."""

TARGETS = {
    "driver": "the process that trains, below the one that watches it",
    "supervisor": "the process that watches, that is the whole `megarl train`; started again with run.resume=auto",
    "rank": "a training rank",
    "engine": "a rollout engine's process",
    "agent": "the process of the agents that act in the episodes (--agents)",
    "reward_server": "the server of rewards; started again by its own service manager, here the benchmark",
    "ray": "one of Ray's own processes: raylet, GCS, agents, monitors",
    "clock": "the time of day, for all Python code of the run (a real one would change it for the machine)",
}
DEEDS = {
    "kill": (signal.SIGKILL, "SIGKILL"),
    "stop": (signal.SIGSTOP, "SIGSTOP, for good"),
    "pause": (signal.SIGSTOP, "SIGSTOP, and SIGCONT some seconds later"),
    "cut": (None, "one of its TCP connections is shut down, both ways"),
    "starve": (None, "it gets no more memory from now on (RLIMIT_AS at what it has)"),
    "oom": (None, "the kernel ends it for want of memory, in a memory cgroup of its own that gets no more"),
    "jump": (None, "a day to the future or to the past"),
}
KINDS = (
    "kill driver", "kill supervisor", "kill rank", "kill engine", "kill reward_server", "kill ray",
    "stop driver", "stop rank", "stop engine", "pause driver", "pause rank", "pause engine", "pause reward_server",
    "cut driver", "cut rank", "cut engine", "cut reward_server", "starve rank", "oom rank",
    "jump clock",
)  # fmt: skip
AGENT_KINDS = ("kill agent", "stop agent", "pause agent", "cut agent", "kill engine", "kill driver", "kill supervisor")
"""Of runs in whose episodes an agent acts."""
CHANGES = ("stop agent",)
"""Kinds after which samples are not those of the undisturbed run: what an agent said until its time was over is kept."""


def agents_config(folder: Path, reward_port: int, steps: int) -> dict[str, Any]:
    """The same with the agent of `examples/agents`: turns over its endpoint, calls of a tool."""
    tree = config(folder, reward_port, steps)
    agent = {"function": str(ROOT / "examples/agents/calculator_agent.py:solve"), "processes": 1, "timeout_s": 20}
    task = {"source": "python", "name": str(ROOT / "examples/tools/calculator.py:word_problems")}
    return tree | {
        "model": {"path": str(ROOT / "models/tiny-calculator"), "dtype": "float32"},
        "data": {"train": task | {"args": {"rows": 400, "seed": 0}}, "max_prompt_tokens": 48},
        "rollout": tree["rollout"]
        | {"max_new_tokens": 48, "deadlines": {"generate_s": 60, "update_s": 20}}
        | {"episode": {"kind": "agent", "max_turns": 3, "agent": agent}},
        "resources": {"deadlines": {"start_s": 120, "step_s": 60, "save_s": 60}},
    }


def config(folder: Path, reward_port: int, steps: int) -> dict[str, Any]:
    """The run of every trial: two data-parallel ranks, an engine, rewards over HTTP, a checkpoint every other step."""
    arithmetic = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    task = {"source": "reasoning_gym", "name": "basic_arithmetic", "limit": 400}
    task["args"] = arithmetic | {"allow_parentheses": False, "allow_negation": False}
    url = f"http://127.0.0.1:{reward_port}/get_reward"
    return {
        "run": {"folder": str(folder), "steps": steps, "save_every": 2, "resume": "auto", "max_restarts": 5}
        | {"log_samples": 10_000, "export": True, "seed": 1},
        "model": {"path": str(ROOT / "models/tiny-arithmetic"), "dtype": "float32"},
        "policy": {"layout": {"dp": 2}, "threads_per_rank": 1, "max_tokens_per_micro_batch": 1024, "optimizer": {"lr": 5e-4}},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
        "data": {"train": task, "chat_template": "never", "max_prompt_tokens": 8},
        "rollout": {"engine": "embedded", "prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 4, "threads": 1}
        | {"deadlines": {"generate_s": 20, "update_s": 20}},
        "resources": {"deadlines": {"start_s": 120, "step_s": 20, "save_s": 60}},
        "rewards": [{"name": "http", "args": {"url": url, "timeout_s": 5, "retries": 7}}],
    }


SLOW = """
import time


def nothing(samples):
    time.sleep(0.1)
    return [0.0] * len(samples)
"""
"""A source of the server's that adds nothing to a reward but time, in which its connection can be cut."""


class RewardServer:
    """`megarl serve-reward` on a port of its own; `see_to` starts it again when it is gone, as a service manager would."""

    def __init__(self, folder: Path, name: str, *, agents: bool = False, adapters: bool = False) -> None:
        """Of runs in whose episodes `agents` act, or that train `adapters`."""
        self._tree, self._adapters = agents_config if agents else config, adapters
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._config = folder / f"{name}.yaml"
        slow = folder / f"{name}_takes_its_time.py"
        slow.write_text(SLOW)
        tree = self.config(folder, self.port, 1) | {"rewards": [{"name": "exact_number"}, {"name": f"{slow}:nothing"}]}
        self._config.write_text(yaml.safe_dump(tree))
        self._log = (folder / f"{name}.log").open("ab")
        self.process = self._start()
        self._wait()

    def config(self, folder: Path, reward_port: int, steps: int) -> dict[str, Any]:
        """The config of these runs."""
        tree = self._tree(folder, reward_port, steps)
        return tree | {"policy": tree["policy"] | {"lora": {"rank": 4}}} if self._adapters else tree

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


MEGARL = (sys.executable, "-m", "megarl")


CLOCK = """
import time

_TIME, _TIME_NS, _JUMP = time.time, time.time_ns, {jump!r}


def _jumped_s():
    try:
        with open(_JUMP) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


time.time = lambda: _TIME() + _jumped_s()
time.time_ns = lambda: _TIME_NS() + _jumped_s() * 10**9
"""
"""A `sitecustomize.py`: from when the file `jump` has a number of seconds in it, the clock is ahead by so much."""


def environment(*folders: Path) -> dict[str, str]:
    """This process's environment, `folders` first on Python's path, without what would make a run join another one's Ray."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), own.get("PYTHONPATH", "")]))}


class Run:
    """`megarl train` on the trial's config, watched from outside."""

    def __init__(self, folder: Path, name: str, reward: RewardServer, steps: int, *, starts: bool = True) -> None:
        """`starts`: run it now; else it has been run before."""
        self.folder, self.steps, self.reward = folder / name, steps, reward
        if not starts:
            return
        shutil.rmtree(self.folder, ignore_errors=True)  # of a trial that was interrupted
        self.folder.mkdir(parents=True)
        self._config = self.folder / "run.yaml"
        self.clock = self.folder / "clock"
        self.clock.mkdir()
        (self.clock / "sitecustomize.py").write_text(CLOCK.format(jump=str(self.clock / "jump")))
        tree = reward.config(folder, reward.port, steps)
        tree["run"]["name"] = name
        self._config.write_text(yaml.safe_dump(tree))
        self.output = (self.folder / "output.log").open("ab")
        self.seen: dict[int, psutil.Process] = {}
        self.start()

    def start(self) -> None:
        """Start the command; a second time after it was killed."""
        command = [*MEGARL, "train", str(self._config)]
        environ = environment(self.clock, ROOT)
        self.process = subprocess.Popen(command, env=environ, stdout=self.output, stderr=self.output)

    @property
    def last_step(self) -> int:
        """The step of the last whole line of metrics.jsonl; 0: none."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.folder / "metrics.jsonl").read_text().split("\n")[-2])["step"])
        return 0

    def find(self, target: str, draw: random.Random) -> psutil.Process | None:
        """A process of that kind that runs now."""
        if target == "reward_server":
            return psutil.Process(self.reward.process.pid) if self.reward.process.poll() is None else None
        if target in ("supervisor", "clock"):
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        found = []
        for process in self.below():
            with contextlib.suppress(psutil.Error):
                line, own_child = " ".join(process.cmdline()), process.ppid() == self.process.pid
                is_it = {
                    "driver": own_child and " train " in line,
                    "rank": "ray::RankProcess" in line,
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
            self.seen |= {process.pid: process for process in found}
            return found
        return []

    def left(self) -> list[str]:
        """Processes of the run that are still there some time after it has ended."""
        ends_at = time.monotonic() + LEFT_S
        while True:
            alive = []
            for process in self.seen.values():
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
        self.output.close()

    def result(self) -> tuple[list[tuple[Any, ...]], str]:
        """What was trained on, in order: (step, group, prompt, response) of every sample; and a hash of the final weights."""
        rows = [json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()]
        samples = [(row["step"], row["group_id"], tuple(row["prompt_ids"]), tuple(row["response_ids"])) for row in rows]
        weights = sorted((self.folder / "model").glob("*.safetensors"))
        return samples, hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest()


@dataclass
class Trial:
    """What was done and what came of it. Times are seconds."""

    kind: str
    after_step: int
    delay_s: float
    hit: str = ""
    completed: bool = False
    exit_code: int | None = None
    restarts: int = 0
    phases: list[str] = field(default_factory=list)
    prompts_lost: int = -1
    prompts_duplicated: int = -1
    same_samples: bool = False
    same_parameters: bool = False
    left_behind: list[str] = field(default_factory=list)
    recovered_s: float | None = None
    """From the fault until the run was further than before it, what had to be done again included."""
    wall_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether it was hit, and nothing was lost, repeated, changed or left behind."""
        exact = (self.same_parameters and self.same_samples) or self.kind in CHANGES
        return (
            bool(self.hit)
            and self.completed
            and exact
            and not (self.prompts_lost or self.prompts_duplicated or self.left_behind)
        )


def do(deed: str, process: psutil.Process, run: Run, draw: random.Random) -> tuple[str, float | None]:
    """Do it; returns what was hit, in words, and after how many seconds to send SIGCONT, if at all."""
    what = f"{process.pid} {process.name()}"
    if deed == "cut":
        return f"{what}: {cut(process, draw)}", None
    if deed == "starve":
        has = process.memory_info().vms
        process.rlimit(psutil.RLIMIT_AS, (has, has))
        return f"{what}: {has} bytes", None
    if deed == "oom":
        end_for_want_of_memory(process)
        return what, None
    if deed == "jump":
        by_s = draw.choice((-86_400, 86_400))
        write_text_atomically(run.clock / "jump", str(by_s))
        return f"{by_s} s", None
    number = DEEDS[deed][0]
    assert number is not None, "the other deeds are signals"
    process.send_signal(number)
    return what, draw.uniform(*PAUSE_S) if deed == "pause" else None


class NotHit(Exception):
    """The process gave no occasion for the deed, for as long as it was looked at."""


def cut(process: psutil.Process, draw: random.Random) -> str:
    """Shut one established TCP connection of the process down, as a network that breaks it would.

    Raises:
        NotHit: there was none within `LOOK_S` seconds; some last for one request.
    """
    ends_at, found = time.monotonic() + LOOK_S, []
    while not found:
        if time.monotonic() > ends_at:
            raise NotHit
        found = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED and one.fd >= 0]
    one = draw.choice(sorted(found, key=lambda one: one.fd))
    handle = os.pidfd_open(process.pid)
    copy = ctypes.CDLL(None, use_errno=True).syscall(438, handle, one.fd, 0)  # pidfd_getfd
    os.close(handle)
    if copy < 0:
        if ctypes.get_errno() in (errno.EBADF, errno.ESRCH):  # it has ended by itself meanwhile
            raise NotHit
        raise OSError(ctypes.get_errno(), "a connection of another process cannot be reached; it takes the right to trace it")
    with socket.socket(fileno=copy) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    return f"connection {one.laddr.port} to {one.raddr.port}"


CGROUPS = Path("/sys/fs/cgroup")


def end_for_want_of_memory(process: psutil.Process) -> None:
    """Have the kernel's out-of-memory killer end the process, and nothing else.

    Raises:
        NotHit: it asked for no memory within `LOOK_S` seconds.
    """
    first_version = (CGROUPS / "memory").exists()
    top = CGROUPS / "memory" if first_version else CGROUPS
    limit, events = ("memory.limit_in_bytes", "memory.oom_control") if first_version else ("memory.max", "memory.events")
    lines = [line.split(":", 2) for line in Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()]
    [home] = [top / path.lstrip("/") for _, controllers, path in lines if controllers == ("memory" if first_version else "")]
    group = top / f"megarl-fault-{process.pid}"
    group.mkdir()
    try:
        (group / limit).write_text("0")
        (group / "cgroup.procs").write_text(str(process.pid))
        ends_at = time.monotonic() + LOOK_S
        while "oom_kill 1" not in (group / events).read_text().splitlines():
            if time.monotonic() > ends_at:
                (home / "cgroup.procs").write_text(str(process.pid))
                raise NotHit
            time.sleep(0.02)
        psutil.wait_procs([process], timeout=LOOK_S)  # a group is removed when nothing is in it
    finally:
        group.rmdir()


def undisturbed(folder: Path, reward: RewardServer, steps: int) -> tuple[Run, float]:
    """The run that others are compared with, and the seconds that one of its steps took from the first to the last.

    One that is in `folder` already is taken.
    """
    found = folder / "undisturbed.json"
    if found.exists():
        return Run(folder, "undisturbed", reward, steps, starts=False), json.loads(found.read_text())
    run, times = Run(folder, "undisturbed", reward, steps), {}
    while run.process.poll() is None:
        times.setdefault(run.last_step, time.monotonic())
        run.below()
        time.sleep(0.1)
    if run.process.returncode != 0 or run.left():
        raise SystemExit(f"the undisturbed run failed or left something behind; see {run.folder / 'output.log'}")
    run.output.close()
    step_s = (times[max(times)] - times[min(set(times) - {0})]) / max(1, steps - 1)
    found.write_text(json.dumps(step_s))
    return run, step_s


def attempt(trial: Trial, name: str, folder: Path, reward: RewardServer, reference: Run, draw: random.Random) -> Trial:
    """Make the run, do the deed at its moment, and compare what comes out with the undisturbed run."""
    deed, target = trial.kind.split()
    run, began = Run(folder, name, reward, reference.steps), time.monotonic()
    hit_at: float | None = None
    due_at: float | None = began + trial.delay_s if not trial.after_step else None
    go_on: tuple[float, psutil.Process] | None = None
    step_then, look_at = 0, began
    try:
        while time.monotonic() - began < TRIAL_S:
            if run.process.poll() is not None:
                if target != "supervisor" or hit_at is None or trial.restarts:
                    break
                trial.left_behind, trial.restarts = run.left(), 1
                run.start()
            now, step = time.monotonic(), run.last_step
            if due_at is None and step >= trial.after_step:
                due_at = now + trial.delay_s
            if hit_at is None and due_at is not None and now >= due_at:
                run.below()
                process = run.find(target, draw)
                if process is not None:
                    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, NotHit):
                        trial.hit, wait_s = do(deed, process, run, draw)
                        hit_at, step_then = time.monotonic(), run.last_step
                        go_on = (hit_at + wait_s, process) if wait_s is not None else None
            if go_on is not None and now >= go_on[0]:
                with contextlib.suppress(psutil.Error):
                    go_on[1].resume()
                go_on = None
            if hit_at is not None and trial.recovered_s is None and step > step_then:
                trial.recovered_s = round(now - hit_at, 2)
            reward.see_to()
            if now >= look_at:
                run.below()
                look_at = now + 1.0
            time.sleep(0.05)
        trial.exit_code, trial.wall_s = run.process.poll(), round(time.monotonic() - began, 1)
        trial.left_behind += run.left() if trial.exit_code is not None else []
        if hit_at is not None and trial.recovered_s is None and trial.exit_code == 0:
            trial.recovered_s = round(time.monotonic() - hit_at, 2)
        judge(trial, run, reference)
    finally:
        run.end()
    return trial


def judge(trial: Trial, run: Run, reference: Run) -> None:
    """Fill in what came of it."""
    with contextlib.suppress(OSError):
        faults = [json.loads(line) for line in (run.folder / "faults.jsonl").read_text().splitlines()]
        trial.restarts += len(faults)
        trial.phases = [fault["phase"] for fault in faults]
    trial.completed = trial.exit_code == 0 and (run.folder / "summary.json").exists()
    if not trial.completed:
        return
    wanted, weights = reference.result()
    got, got_weights = run.result()
    prompts, got_prompts = (Counter((row[0], row[1]) for row in rows) for rows in (wanted, got))
    trial.prompts_lost, trial.prompts_duplicated = (prompts - got_prompts).total(), (got_prompts - prompts).total()
    trial.same_samples, trial.same_parameters = wanted == got, weights == got_weights
