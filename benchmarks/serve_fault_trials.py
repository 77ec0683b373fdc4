"""One trial of `serve_faults.py`: the loop of a client, and what is done to its server, its connections or itself."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fault_trials import NotHit, shut_down
from serve_fault_runs import Client, Proxy, Server, snapshots_under_way

TRIAL_S = 240.0
STEP_S = 0.6
"""About what a step takes, in which the moment of the deed is drawn."""
KINDS = {
    "kill rank": "a training rank gets SIGKILL",
    "kill engine": "one of SGLang's processes gets SIGKILL",
    "kill actor": "the process that watches over SGLang's gets SIGKILL",
    "kill driver": "the process that answers clients gets SIGKILL; the one that watches it starts it again",
    "kill server": "the whole `megarl serve` gets SIGKILL, and is started again in its folder",
    "term server": "the whole `megarl serve` gets SIGTERM, and is started again in its folder",
    "pause driver": "the process that answers clients gets SIGSTOP, and SIGCONT 3 s later",
    "cut client": "six times, connections of clients are shut down, both ways",
    "cut engine": "a connection between server and engine is shut down, both ways",
    "lose answers": "for 4 s, half of the answers are lost on the way to the client, and their connections with them",
    "kill client": "the client gets SIGKILL; a new one loads the state that was saved last",
    "tear journal": "as `kill server`, and it was writing: a request, a checkpoint and a snapshot are there in part",
    "kill snapshot": "as `kill server`, at the moment when a snapshot is being written",
    "kill server, again": "as `kill server`, and a second time while it starts",
    "kill rank, again": "as `kill rank`, and a second time as soon as there is a new one",
    "kill rank, engine": "a rank and an engine at the same time",
    "kill client, rank": "the client and a rank at the same time",
}


HELD_UP = ("pause driver", "lose answers")
"""Kinds whose end is awaited, however the trial went."""


@dataclass
class Trial:
    """What was done and what came of it. Times are seconds."""

    number: int
    layout: str
    kind: str
    models: int
    after_step: int
    share_of_step: float
    """When in that step, from 0 to 1."""
    hit: str = ""
    completed: bool = False
    failure: str = ""
    same_losses: bool = False
    same_log_probs: bool = False
    same_samples: bool = False
    same_adapters: bool = False
    server_starts: int = 0
    paused_s: float | None = None
    """The longest time between two steps of the client, or before its end, from the fault on."""
    wall_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether it was hit, and its client noticed a pause at most."""
        same = self.same_losses and self.same_log_probs and self.same_samples and self.same_adapters
        return bool(self.hit) and self.completed and same


# --- what is done ----------------------------------------------------------------------------------------------------------


Rest = Callable[[], None] | None
"""What remains of a deed: it is called again and again until it raises StopIteration."""


def do(trial: Trial, server: Server, client: Client, proxy: Proxy, draw: random.Random) -> tuple[str, Rest]:
    """Do it; returns what was hit, in words, and what remains.

    Raises:
        NotHit: there was nothing to do it to.
    """
    deed, _, target = trial.kind.partition(" ")
    target, _, second = target.partition(", ")
    if trial.kind == "lose answers":
        proxy.loses = True
        ends_at = time.monotonic() + 4.0
        return "the proxy loses answers", lambda: until(ends_at, lambda: setattr(proxy, "loses", False))
    if deed == "cut":
        return cut(server, target, draw)
    if trial.kind == "kill snapshot":
        wait_for_snapshot(server)
    said = hit(server, client, "server" if trial.kind in ("tear journal", "kill snapshot") else target, deed, draw)
    if trial.kind == "tear journal":
        said += f"; {tear(server, draw)}"
    if deed == "pause":
        process, ends_at = psutil.Process(int(said.split()[0])), time.monotonic() + 3.0
        return said, lambda: until(ends_at, process.resume)
    if second == "again":
        return said, again(server, target, draw)
    if second:
        said += "; " + hit(server, client, second, "kill", draw)
    return said, None


def until(ends_at: float, end: Callable[[], Any]) -> None:
    """Call `end` once it is time."""
    if time.monotonic() >= ends_at:
        end()
        raise StopIteration


def hit(server: Server, client: Client, target: str, deed: str, draw: random.Random) -> str:
    """Send a process of that kind the deed's signal."""
    if target == "client":
        client.kill()
        return "the client"
    found = server.find(target)
    if not found:
        raise NotHit
    process = draw.choice(found)
    name = f"{process.pid} {process.name()}"
    number = {"term": signal.SIGTERM, "pause": signal.SIGSTOP}.get(deed, signal.SIGKILL)
    process.send_signal(signal.SIGUSR1 if server.is_reference and target == "rank" else number)
    return name


def cut(server: Server, target: str, draw: random.Random) -> tuple[str, Rest]:
    """Shut down connections of the server: with clients six times, with the engine once."""
    driver = server.find("driver")[0]
    ports = {server.port} if target == "client" else listening(server.find("engine"))
    done = [shut_down(driver, ports, draw)]

    def go_on() -> None:
        with contextlib.suppress(NotHit):
            done.append(shut_down(driver, ports, draw))
        time.sleep(0.2)
        if len(done) >= 6:
            raise StopIteration

    return done[0], go_on if target == "client" else None


def listening(processes: list[psutil.Process]) -> set[int]:
    """The ports that processes listen at."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return found


def wait_for_snapshot(server: Server) -> None:
    """Return while the server writes a snapshot; raises NotHit where it wrote none for some seconds."""
    ends_at = time.monotonic() + 8.0
    while not snapshots_under_way(server.journal):
        if time.monotonic() > ends_at:
            raise NotHit
        time.sleep(0.0005)


def again(server: Server, target: str, draw: random.Random) -> Callable[[], None]:
    """A second kill: of the next such process once it is there, or of the server some time into its start."""
    before, wait_s = {process.pid for process in server.find(target)}, draw.uniform(0.0, 15.0)
    seen_at: list[float] = []

    def look() -> None:
        new = [process for process in server.find(target) if process.pid not in before]
        if new and not seen_at:
            seen_at.append(time.monotonic())
        if seen_at and time.monotonic() > seen_at[0] + (wait_s if target == "server" else wait_s / 5):
            with contextlib.suppress(psutil.NoSuchProcess):
                draw.choice(new or server.find(target)).kill()
            raise StopIteration

    return look


def tear(server: Server, draw: random.Random) -> str:
    """Leave what a server that is killed while it writes leaves: parts of a request, of a checkpoint, of a snapshot."""
    server.process.wait(30)
    time.sleep(3.0)  # for what ends with it
    logs = sorted(server.journal.glob("*/requests-*.log"))
    for log in logs:
        content = log.read_bytes()
        part = (content or b"mjr1")[: draw.randrange(4, 200)]
        with log.open("ab") as file:
            file.write(part[:-1])
        state = log.parent / ".snapshot-000000009999.torn" / "state"
        state.mkdir(parents=True, exist_ok=True)
        (state / "model.json").write_text('{"ada')
        (log.parent / "requests-000000009999.part").write_bytes(part)
    for kind in server.checkpoints.glob("*/*"):
        data = kind / ".part-0123456789abcdef" / "content" / "data"
        data.mkdir(parents=True, exist_ok=True)
        (data / "adapter_model.safetensors").write_bytes(b"\x00" * 100)
    return f"parts behind {len(logs)} journals"


# --- a trial ---------------------------------------------------------------------------------------------------------------


def attempt(trial: Trial, server: Server, reference: list[dict[str, Any]], folder: Path, draw: random.Random) -> Trial:
    """Run the client's loop, do the deed at its moment, and compare."""
    began, proxy, starts = time.monotonic(), Proxy(server.port, draw), server.starts
    url = proxy.url if trial.kind == "lose answers" else server.url
    client = Client(folder / f"trial-{trial.number:03d}", url, trial.models)
    moment = Moment(trial)
    try:
        while client.done is None and not client.failure and time.monotonic() < began + TRIAL_S:
            if moment.is_now(client):
                with contextlib.suppress(NotHit, psutil.NoSuchProcess):
                    trial.hit, moment.rest = do(trial, server, client, proxy, draw)
                    moment.hit_at = time.monotonic()
            moment.go_on()
            server.see_to()
            if not client.process.is_alive() and client.done is None and not client.failure:
                client.start_again()
            if client.step != moment.step:
                moment.step, moment.step_at = client.step, time.monotonic()
            if moment.hit_at is not None:
                pause_s = time.monotonic() - max(moment.hit_at, moment.step_at)
                trial.paused_s = max(trial.paused_s or 0.0, round(pause_s, 2))
            time.sleep(0.1)
    finally:
        moment.end()
        client.kill()
        proxy.close()
    trial.failure, trial.server_starts = client.failure, server.starts - starts
    trial.wall_s = round(time.monotonic() - began, 1)
    judge(trial, client.done, reference)
    return trial


@dataclass
class Moment:
    """When the deed of a trial is done, and what remains of it."""

    trial: Trial
    due_at: float | None = None
    hit_at: float | None = None
    step: int = -1
    step_at: float = 0.0
    rest: Rest = None

    def is_now(self, client: Client) -> bool:
        """Return whether it is to be done now."""
        if self.hit_at is None and self.due_at is None and client.step >= self.trial.after_step:
            self.due_at = time.monotonic() + self.trial.share_of_step * STEP_S
        return self.hit_at is None and self.due_at is not None and time.monotonic() >= self.due_at

    def go_on(self) -> None:
        """Do what remains."""
        if self.rest is not None:
            try:
                self.rest()
            except (StopIteration, psutil.NoSuchProcess):
                self.rest = None

    def end(self) -> None:
        """Have what is held up go on, however the trial went."""
        while self.rest is not None and self.trial.kind in HELD_UP:
            self.go_on()
            time.sleep(0.1)


def judge(trial: Trial, done: list[dict[str, Any]] | None, reference: list[dict[str, Any]]) -> None:
    """Fill in what came of it."""
    trial.completed = done is not None
    if done is None:
        return
    pairs = list(zip(done, reference, strict=False))
    same = {name: all(got[name] == wanted[name] for got, wanted in pairs) for name in pairs[0][1]}
    trial.same_losses, trial.same_log_probs = same["losses"], same["log_probs"]
    trial.same_samples, trial.same_adapters = same["samples"], same["adapters"]
