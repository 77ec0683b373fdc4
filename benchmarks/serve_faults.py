"""Do clients of `megarl serve` notice more than a pause, whatever happens to its processes, its connections or themselves?

    make tiny-model
    python benchmarks/serve_faults.py --trials 40 --seed 0 --out benchmarks/results/faults_serve.json

A trial is the loop of a real client (the package `tinker`) over one or two models: passes, steps, samples, saved states, in a
layout of one or two ranks. At a random moment something is done to the server or the client. The trial is good if the loop
ends, and its losses, the log-probs of fixed rows, greedy samples and the downloaded adapters are those of an undisturbed loop
to the last bit. A client that was killed is begun again from the state that it saved last.

The file is written after every trial, and the same command with `--resume` does those that it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from fault_runs import WarmWorkers
from fault_trials import NotHit, shut_down
from measured_code import code_of
from serve_fault_runs import LAYOUTS, REFERENCE, STEPS, Client, Proxy, Server, Warm, snapshots_under_way
from warm_servers import WarmSglang
from workload import machine, versions

from megarl.system.atomic_files import write_text_atomically

TRIAL_S = 240.0
SNAPSHOT_EVERY_S = 1.0
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
NEEDS_ENGINES = {"engine", "actor"}
"""Words of kinds that the server without ranks and engines has nothing for; a rank that is lost is a signal to it."""
LOCKED_S = 240.0
"""For how long trials are begun under one lock."""


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
    """From the fault until the client's next step."""
    wall_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether it was hit, and its client noticed a pause at most."""
        same = self.same_losses and self.same_log_probs and self.same_samples and self.same_adapters
        return bool(self.hit) and self.completed and same


def plan(trials: int, kinds: list[str], layouts: list[str], draw: random.Random) -> list[Trial]:
    """Every kind in turn, on servers of every layout, half of them of one rank; trials of a layout follow each other."""
    weighted = [layout for layout in layouts for _ in range(1 if LAYOUTS.get(layout) else 2)]
    cells = [(weighted[number % len(weighted)], kinds[number % len(kinds)]) for number in range(trials)]
    draw.shuffle(cells)
    cells.sort(key=lambda cell: layouts.index(cell[0]))
    return [
        Trial(number, layout, kind, draw.choice((1, 2)), draw.randrange(STEPS), round(draw.random(), 3))
        for number, (layout, kind) in enumerate(cells)
    ]


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
                    moment.hit_at, moment.step_then = time.monotonic(), client.step
            moment.go_on()
            server.see_to()
            if not client.process.is_alive() and client.done is None and not client.failure:
                client.start_again()
            if moment.hit_at is not None and trial.paused_s is None and client.step > moment.step_then:
                trial.paused_s = round(time.monotonic() - moment.hit_at, 2)
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
    step_then: int = -1
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
        for _ in range(100):
            if self.rest is None or "again" in self.trial.kind:
                return
            self.go_on()
            time.sleep(0.1)


STEP_S = 0.6
"""About what a step takes, in which the moment of the deed is drawn."""


def judge(trial: Trial, done: list[dict[str, Any]] | None, reference: list[dict[str, Any]]) -> None:
    """Fill in what came of it."""
    trial.completed = done is not None
    if done is None:
        return
    pairs = list(zip(done, reference, strict=False))
    same = {name: all(got[name] == wanted[name] for got, wanted in pairs) for name in pairs[0][1]}
    trial.same_losses, trial.same_log_probs = same["losses"], same["log_probs"]
    trial.same_samples, trial.same_adapters = same["samples"], same["adapters"]


def undisturbed(server: Server, folder: Path) -> list[dict[str, Any]]:
    """The loop over two models that nothing happens to."""
    client = Client(folder / f"undisturbed-{server.layout.replace('=', '')}", server.url, 2)
    ends_at = time.monotonic() + TRIAL_S
    while client.done is None:
        if client.failure or time.monotonic() > ends_at:
            raise SystemExit(f"the undisturbed loop failed: {client.failure}")
        time.sleep(0.1)
    return client.done


# --- all of them -----------------------------------------------------------------------------------------------------------


def summary(trials: list[Trial]) -> dict[str, object]:
    """Counts and times."""
    pauses = [trial.paused_s for trial in trials if trial.paused_s is not None]
    by_kind: dict[str, list[Trial]] = {}
    for trial in trials:
        by_kind.setdefault(trial.kind, []).append(trial)
    return {
        "trials": len(trials),
        "good": sum(trial.is_good for trial in trials),
        "completed": sum(trial.completed for trial in trials),
        "identical_losses": sum(trial.same_losses for trial in trials),
        "identical_log_probs": sum(trial.same_log_probs for trial in trials),
        "identical_samples": sum(trial.same_samples for trial in trials),
        "identical_adapters": sum(trial.same_adapters for trial in trials),
        "median_paused_s": statistics.median(pauses) if pauses else None,
        "longest_paused_s": max(pauses, default=None),
        "median_wall_s": statistics.median(trial.wall_s for trial in trials) if trials else None,
        "by_kind": {
            kind: {
                "trials": len(some),
                "good": sum(trial.is_good for trial in some),
                "median_paused_s": round(statistics.median([t.paused_s for t in some if t.paused_s is not None] or [0]), 2),
            }
            for kind, some in sorted(by_kind.items())
        },
        "by_layout": {
            layout: {"trials": len(some), "good": sum(trial.is_good for trial in some)}
            for layout in (*LAYOUTS, REFERENCE)
            if (some := [trial for trial in trials if trial.layout == layout])
        },
    }


def series(arguments: argparse.Namespace) -> dict[str, object]:
    """What the trials follow from."""
    return {name: getattr(arguments, name) for name in ("trials", "seed", "kinds", "layouts")}


class Campaign:
    """The trials of one command; a server is started where there is none of the layout, or the last trial was bad."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.done: dict[int, Trial] = {}
        self.times: dict[str, float] = {}
        self._server: Server | None = None
        self._reference: list[dict[str, Any]] = []
        if arguments.resume and arguments.out.exists():
            written = json.loads(arguments.out.read_text())
            if written["series"] != series(arguments):
                raise SystemExit(f"{arguments.out} is of another series: {written['series']}")
            self.done = {one["number"]: Trial(**one) for one in written["trial"]}

    def run(self) -> None:
        """Do the trials that are not done."""
        arguments, ends_at = self.arguments, time.monotonic() + self.arguments.for_s
        planned = plan(arguments.trials, arguments.kinds, arguments.layouts, random.Random(arguments.seed))
        left = [trial for trial in planned if trial.number not in self.done]
        with contextlib.ExitStack() as stack:
            warm = None
            if arguments.layouts != [REFERENCE]:
                warm = Warm(stack.enter_context(WarmWorkers()), stack.enter_context(WarmSglang()))
                warm.workers.wait()
            stack.callback(self._end)
            while left and time.monotonic() < ends_at:
                with locked(arguments.lock):
                    free_at = time.monotonic() + LOCKED_S
                    while left and time.monotonic() < min(ends_at, free_at):
                        self._one(left.pop(0), warm)
                time.sleep(1.0)

    def _one(self, trial: Trial, warm: Warm | None) -> None:
        server = self._serving(trial.layout, warm)
        draw = random.Random(f"{self.arguments.seed} {trial.number}")
        done = attempt(trial, server, self._reference, self.folder, draw)
        self.done[trial.number] = done
        good = sum(one.is_good for one in self.done.values())
        said = json.dumps({name: value for name, value in asdict(done).items() if name != "number"})
        print(f"{done.number} {'good' if done.is_good else 'BAD'} ({good} of {len(self.done)}) {said}", flush=True)
        self._write()
        if not done.is_good:
            self._end()

    def _serving(self, layout: str, warm: Warm | None) -> Server:
        if self._server is not None and self._server.layout != layout:
            self._end()
        if self._server is None:
            name = f"server-{layout.replace('=', '')}-{len(self.done)}"
            self._server = Server(self.folder / name, layout, warm, SNAPSHOT_EVERY_S)
            self.times[layout] = round(self._server.wait(), 1)
            began = time.monotonic()
            self._reference = undisturbed(self._server, self.folder)
            loop_s = time.monotonic() - began
            print(f"{layout}: the server starts in {self.times[layout]} s, the loop takes {loop_s:.1f} s", flush=True)
        self._server.see_to()
        self._server.wait()
        return self._server

    def _end(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _write(self) -> None:
        if self.arguments.out is not None:
            trials = [self.done[number] for number in sorted(self.done)]
            written = {
                "command": " ".join(["benchmarks/serve_faults.py", *sys.argv[1:]]),
                "series": series(self.arguments),
                "date": time.strftime("%Y-%m-%d"),
                "machine": machine(),
                "versions": versions(),
                "code": code_of("serve_faults"),
                "kinds": KINDS,
                "steps_of_a_loop": STEPS,
                "start_s": self.times,
                **summary(trials),
                "trial": [asdict(one) for one in trials],
            }
            self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.arguments.out, json.dumps(written, indent=1) + "\n")


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="such as 'kill rank'")
    parser.add_argument(
        "--layouts", nargs="+", choices=[*LAYOUTS, REFERENCE], default=list(LAYOUTS), help=f"{REFERENCE}: alone"
    )
    parser.add_argument("--for-s", type=float, default=float("inf"), metavar="S", help="begin none later than after so long")
    parser.add_argument(
        "--lock", type=Path, help="file that is locked while a trial is under way: other work has its turns between"
    )
    parser.add_argument("--keep", type=Path, help="folder that keeps servers and clients")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every trial")
    parser.add_argument("--resume", action="store_true", help="do only the trials that --out lacks")
    arguments = parser.parse_args()
    if arguments.layouts == [REFERENCE]:
        arguments.kinds = [kind for kind in arguments.kinds if not NEEDS_ENGINES & {*kind.replace(",", "").split()}]
    elif REFERENCE in arguments.layouts:
        parser.error(f"--layouts {REFERENCE} stands alone")
    if arguments.resume and arguments.out is None:
        parser.error("--resume needs --out")
    return arguments


@contextlib.contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold the lock of a file, if there is one."""
    if file is None:
        yield
        return
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="megarl-serve-faults-") as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser)
    with _folder(arguments.keep) as folder:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are ended too
        campaign = Campaign(arguments, folder)
        campaign.run()
    print(json.dumps(summary([*campaign.done.values()]), indent=1))


if __name__ == "__main__":
    main()
