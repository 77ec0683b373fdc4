"""One trial of `faults.py`: a tiny run in processes of its own, one of which is killed, stopped, held up or cut off.

What is hit is found below the `megarl train` process by what it calls itself. Linux, rights to trace the own processes, and for
`oom` to make memory cgroups.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from fault_runs import MEGARL, Outcome, Place, RayNodes, Records, Run

from megarl.system.atomic_files import write_text_atomically

PAUSE_S = (1.0, 4.0)
"""How long a process is held up that goes on afterwards."""
TRIAL_S = 1200.0
LOOK_S = 3.0

TARGETS = {
    "driver": "the process that trains, below the one that watches it",
    "supervisor": "the process that watches, that is the whole `megarl train`; started again with run.resume=auto",
    "rank": "a training rank",
    "engine": "a rollout engine's process",
    "agent": "the process of the agents that act in the episodes (family `agents`)",
    "reward_server": "the server of rewards; started again by its own service manager, here the benchmark",
    "ranks": "both ranks of a replica (tp 2) at once",
    "weight": "one bit of a weight of a rank",
    "node": "a node that the driver is not on: all of Ray there; started again by its service manager, here the benchmark",
    "nodes": "two such nodes at once",
    "link": "such a node's link to the network",
    "ray": "one of Ray's own processes: raylet, GCS, agents, monitors",
    "rival": "a second `megarl train` of the same config, with run.resume=auto, beside the run: it must be refused with a "
    "sentence that names the first",
    "clock": "the time of day, for all Python code of the run (a real one would change it for the machine)",
}
DEEDS = {
    "kill": (signal.SIGKILL, "SIGKILL"),
    "stop": (signal.SIGSTOP, "SIGSTOP, for good"),
    "pause": (signal.SIGSTOP, "SIGSTOP, and SIGCONT some seconds later; of a link: it is down for so long"),
    "cut": (None, "one of its TCP connections is shut down, both ways"),
    "starve": (None, "it gets no more memory from now on (RLIMIT_AS at what it has)"),
    "oom": (None, "the kernel ends it for want of memory, in a memory cgroup of its own that gets no more"),
    "start": (None, "it is started (a rival once the run owns its folder, and waited for)"),
    "leave": (None, "`megarl node leave`, and then all of Ray on its node gets SIGKILL"),
    "flip": (None, "it is turned over, by a thread that lies in wait in the process"),
    "slow": (None, "for 20 s it is stopped for half of the time (SIGSTOP and SIGCONT, ten times a second)"),
    "jump": (None, "a day to the future or to the past"),
}
KINDS = {
    "plain": (
        "kill driver", "kill supervisor", "kill rank", "kill engine", "kill reward_server", "kill ray",
        "stop driver", "stop rank", "stop engine", "pause driver", "pause rank", "pause engine", "pause reward_server",
        "cut driver", "cut rank", "cut engine", "cut reward_server", "starve rank", "oom rank",
        "jump clock", "start rival",
    ),
    "agents": (
        "kill agent", "stop agent", "pause agent", "cut agent", "kill engine", "stop engine", "kill driver", "kill supervisor",
    ),
    "adapters": (
        "kill driver", "kill supervisor", "kill rank", "stop rank", "cut rank",
        "kill engine", "stop engine", "pause engine", "cut engine",
    ),
    "pictures": ("kill driver", "kill supervisor", "kill rank", "stop rank", "kill engine", "stop engine", "cut engine"),
    "asynchronous": (
        "kill driver", "kill supervisor", "kill rank", "stop rank", "pause rank", "cut rank",
        "kill engine", "stop engine", "pause engine", "cut engine",
    ),
    "nodes": ("kill rank", "kill engine", "pause link", "kill node"),
    "spares": (
        "kill rank", "kill ranks", "stop rank", "pause rank", "cut rank", "oom rank", "slow rank", "flip weight",
        "kill driver", "kill supervisor", "kill engine",
    ),
    "spare_nodes": ("kill rank", "kill node", "kill nodes", "pause link"),
    "coming_engines": ("start node", "leave engine", "kill engine", "stop engine", "kill node", "pause link"),
}  # fmt: skip
"""Of each family of runs (`fault_runs.py`)."""
TIMED = ("asynchronous", "coming_engines")
"""Families in which the clock says under which weights a response is sampled: no run repeats another's samples."""
CHANGES = ("stop agent",)
"""Kinds after which samples are not those of the undisturbed run: what an agent said until its time was over is kept."""
UNFORKED = ("jump clock", "flip weight")
"""Kinds of runs each of whose processes is a Python of its own: one that was forked imports no `sitecustomize.py`."""


@dataclass
class Trial:
    """What was done and what came of it. Times are seconds."""

    number: int
    family: str
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
    same_records: bool = True
    """Of a run beside which a rival was started: whether no file of it differs in steps, and nothing was begun again."""
    left_behind: list[str] = field(default_factory=list)
    recovered_s: float | None = None
    """From the fault until the run was further than before it, what had to be done again included."""
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether it was hit, and nothing was lost, repeated, changed or left behind."""
        exact = (self.same_parameters and self.same_samples) or self.kind in CHANGES or self.family in TIMED
        return (
            bool(self.hit)
            and self.completed
            and exact
            and self.same_records
            and not (self.prompts_lost or self.prompts_duplicated or self.left_behind)
        )


Undo = tuple[float, Callable[[], None]]
"""After how many seconds a deed is over, and what ends it."""


def do(kind: str, process: psutil.Process, run: Run, draw: random.Random) -> tuple[str, Undo | None]:
    """Do it; returns what was hit, in words, and how it ends, if it does."""
    deed, target = kind.split()
    what = f"{process.pid} {process.name()}"
    if kind in OF_NODES:
        assert run.nodes is not None, "only runs over nodes have links"
        return OF_NODES[kind](run, run.nodes, draw)
    if kind == "start rival":
        return f"rival: {start_rival(run)}", None
    if target == "ranks":
        return end_replica(run, draw), None
    if target == "weight":
        return flip(process, run), None
    if deed == "slow":
        return what, (SLOW_S, slow(process))
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
    return what, (draw.uniform(*PAUSE_S), process.resume) if deed == "pause" else None


class NotHit(Exception):
    """The process gave no occasion for the deed, for as long as it was looked at."""


def _some(nodes: RayNodes, draw: random.Random, count: int = 1) -> list[int]:
    """Numbers of nodes that are up, of which the driver's, 0, is none."""
    return draw.sample([number for number in nodes.started if number], count)


def _end_node(nodes: RayNodes, number: int) -> str:
    """Kill all of Ray on a node."""
    process = nodes.process(number)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    return nodes.network.nodes[number].name


def pause_link(run: Run, nodes: RayNodes, draw: random.Random) -> tuple[str, Undo | None]:
    """Have a node without network for some seconds."""
    [number] = _some(nodes, draw)
    network = nodes.network
    network.connect(number + 1, is_up=False)
    return network.nodes[number].name, (draw.uniform(*PAUSE_S), lambda: network.connect(number + 1, is_up=True))


def end_nodes(run: Run, nodes: RayNodes, draw: random.Random, count: int) -> tuple[str, Undo | None]:
    """Kill all of Ray on `count` nodes."""
    return ", ".join(_end_node(nodes, number) for number in _some(nodes, draw, count)), None


def start_node(run: Run, nodes: RayNodes, draw: random.Random) -> tuple[str, Undo | None]:
    """Have the last node join."""
    number = len(nodes.network.nodes) - 1
    nodes.start(number)
    return nodes.network.nodes[number].name, None


def leave_node(run: Run, nodes: RayNodes, draw: random.Random) -> tuple[str, Undo | None]:
    """Have an engine leave with notice, as before a spot machine goes, and end its node.

    Raises:
        NotHit: the run has not told of any.
    """
    try:
        engines = json.loads((run.folder / "engines.json").read_text())["engines"]
    except (OSError, ValueError):
        raise NotHit from None
    there = [engine for engine in engines if engine["stage"] == "there"]
    if not there:
        raise NotHit
    address = draw.choice(there)["node"]
    done = subprocess.run([*MEGARL, "node", "leave", str(run.folder), address], capture_output=True, text=True, check=False)
    [number] = [number for number, node in enumerate(nodes.network.nodes) if node.address == address]
    return f"{done.stdout.strip()}{done.stderr.strip()}; {_end_node(nodes, number)}", None


OF_NODES: dict[str, Callable[[Run, RayNodes, random.Random], tuple[str, Undo | None]]] = {
    "pause link": pause_link,
    "kill node": partial(end_nodes, count=1),
    "kill nodes": partial(end_nodes, count=2),
    "start node": start_node,
    "leave engine": leave_node,
}


def end_replica(run: Run, draw: random.Random) -> str:
    """Kill the two ranks of a replica.

    Raises:
        NotHit: they are not there.
    """
    ranks: dict[int, psutil.Process] = {}
    for process in run.below():
        with contextlib.suppress(psutil.Error):
            names = (
                [Path(file.path).name for file in process.open_files()]
                if "ray::RankProcess" in " ".join(process.cmdline())
                else []
            )
            ranks |= {number: process for number in range(4) if f"policy-{number}.log" in names}
    if len(ranks) < 4:
        raise NotHit
    first = draw.choice((0, 2))
    for number in (first, first + 1):
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks[number].kill()
    return f"ranks {first} and {first + 1}"


def flip(process: psutil.Process, run: Run) -> str:
    """Have a bit of one of the process's weights turned over (`fault_runs.FLIP`).

    Raises:
        NotHit: it has no weights.
    """
    file = run.clock / "flip"
    write_text_atomically(file, str(process.pid))
    ends_at = time.monotonic() + LOOK_S
    while time.monotonic() < ends_at:
        if (done := run.clock / "flipped").exists():
            return f"{process.pid}: {done.read_text()}"
        time.sleep(0.05)
    file.unlink()
    raise NotHit


SLOW_S = 20.0


def slow(process: psutil.Process) -> Callable[[], None]:
    """Stop the process for half of the time; returns what ends that."""
    over = threading.Event()

    def hold_up() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not over.wait(0.05):
                process.suspend()
                over.wait(0.05)
                process.resume()

    thread = threading.Thread(target=hold_up, daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


RIVAL_S = 120.0


def start_rival(run: Run) -> str:
    """Start the run's command beside it and return what it said, which must be that the run is alive, by its process.

    Raises:
        NotHit: the run was over before the rival looked.
    """
    rival = run.rival()
    try:
        said = rival.communicate(timeout=RIVAL_S)[0].decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        said = f"it still ran after {RIVAL_S:.0f} s"
    finally:
        rival.kill()
    wanted = f"belongs to a run that is alive: process {run.process.pid} of"
    if rival.returncode == 2 and wanted in said and len(said.splitlines()) == 1:
        return said
    if run.process.poll() is not None:
        raise NotHit
    return f"NOT REFUSED (exit code {rival.returncode}): {said[-500:]}"


def cut(process: psutil.Process, draw: random.Random) -> str:
    """Shut one established TCP connection of the process down, as a network that breaks it would.

    Raises:
        NotHit: there was none within `LOOK_S` seconds; some last for one request.
    """
    return shut_down(process, None, draw)


def shut_down(process: psutil.Process, ports: set[int] | None, draw: random.Random) -> str:
    """Shut a connection of the process down that has one of `ports` at an end; None: any.

    Raises:
        NotHit: there was none within `LOOK_S` seconds.
    """
    ends_at, found = time.monotonic() + LOOK_S, []
    while not found:
        if time.monotonic() > ends_at:
            raise NotHit
        found = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED and one.fd >= 0]
        found = [one for one in found if ports is None or ports & {one.laddr.port, one.raddr.port}]
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


@dataclass(frozen=True)
class Reference:
    """A run that was left alone: what it came to, and its seconds until its first step and for each further one."""

    outcome: Outcome
    steps: int
    start_s: float
    step_s: float
    records: Records


def undisturbed(place: Place, family: str, steps: int) -> Reference:
    """The run that others of the family are compared with."""
    began = time.monotonic()
    run, times = Run(f"undisturbed-{family}", place, family, steps), {}
    while run.process.poll() is None:
        times.setdefault(run.last_step, time.monotonic())
        run.below()
        time.sleep(0.1)
    if run.process.returncode != 0 or run.left():
        raise SystemExit(f"the undisturbed run failed or left something behind; see {run.folder / 'output.log'}")
    outcome, records = run.outcome(), run.records()
    run.end()
    first = times[min(set(times) - {0})]
    return Reference(outcome, steps, first - began, (times[max(times)] - first) / max(1, steps - 1), records)


def attempt(trial: Trial, place: Place, reference: Reference, draw: random.Random) -> Trial:
    """Make the run, do the deed at its moment, and compare what comes out with the undisturbed run."""
    _, target = trial.kind.split()
    began, name = time.monotonic(), f"trial-{trial.number:03d}"
    run = Run(name, place, trial.family, reference.steps, is_forked=trial.kind not in UNFORKED)
    hit_at: float | None = None
    due_at: float | None = began + trial.delay_s if not trial.after_step else None
    undo: Undo | None = None
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
                        trial.hit, undo = do(trial.kind, process, run, draw)
                        hit_at, step_then = time.monotonic(), run.last_step
            if undo is not None and hit_at is not None and now >= hit_at + undo[0]:
                with contextlib.suppress(psutil.Error):
                    undo[1]()
                undo = None
            if hit_at is not None and trial.recovered_s is None and step > step_then:
                trial.recovered_s = round(now - hit_at, 2)
            run.see_to()
            if now >= look_at:
                run.below()
                look_at = now + 1.5
            time.sleep(0.1)
        trial.exit_code, trial.wall_s = run.process.poll(), round(time.monotonic() - began, 1)
        trial.left_behind += run.left() if trial.exit_code is not None else []
        if hit_at is not None and trial.recovered_s is None and trial.exit_code == 0:
            trial.recovered_s = round(time.monotonic() - hit_at, 2)
        trial.cpu_s = round(run.cpu_s, 1)
        judge(trial, run, reference)
    finally:
        run.end()
    return trial


def judge(trial: Trial, run: Run, reference: Reference) -> None:
    """Fill in what came of it."""
    with contextlib.suppress(OSError):
        faults = [json.loads(line) for line in (run.folder / "faults.jsonl").read_text().splitlines()]
        trial.restarts += len(faults)
        trial.phases = [fault["phase"] for fault in faults]
    trial.completed = trial.exit_code == 0 and (run.folder / "summary.json").exists()
    if not trial.completed:
        return
    wanted, weights = reference.outcome
    got, got_weights = run.outcome()
    prompts, got_prompts = (Counter((row[0], row[1]) for row in rows) for rows in (wanted, got))
    trial.prompts_lost, trial.prompts_duplicated = (prompts - got_prompts).total(), (got_prompts - prompts).total()
    trial.same_samples, trial.same_parameters = wanted == got, weights == got_weights
    if trial.kind == "start rival":
        is_refused = "NOT REFUSED" not in trial.hit and not trial.restarts
        trial.same_records = is_refused and run.records() == reference.records
