"""Does a long run stay as large as it was? One real run, measured from outside for hours.

    make tiny-calculator
    python benchmarks/soak.py --minutes 120 --out benchmarks/results/soak.json

The run: SGLang, two data-parallel ranks, episodes in which an agent acts over its endpoint, rewards over HTTP from
`megarl serve-reward`, evaluations, checkpoints every 20 steps that are mirrored, and a Prometheus endpoint; beside it
`megarl report --watch`. Every 30 s the endpoint is scraped, the page and its data are fetched, and every process is measured:
memory of its own (`Private_*` of `smaps_rollup`), open files, sockets, threads. At the end the run gets one Ctrl-C.

After the first fifth of the time a figure of a process is flat if its growth over the rest, by the Theil-Sen slope (the median
of the slopes of all pairs), is below one file, socket or thread, and below 16 MiB or 3 % of memory. The page's server holds all
rows of metrics: it may grow by ten times the bytes that the run writes of them. Run it in a checkout that nothing changes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import yaml
from fault_runs import LEFT_S, MEGARL, ROOT, RewardServer, config, environment, last_step
from measured_code import code_of
from workload import free_port, machine, publish, versions

WARM_UP_SHARE = 0.2
MEMORY_BYTES, MEMORY_SHARE, TIMES_WRITTEN = 16 * 2**20, 0.03, 10
ROWS = ("metrics.jsonl", "distributions.jsonl", "trace.jsonl")
"""What the page's server holds in memory."""
PAGE = "megarl report"
FIGURES = ("memory_bytes", "files", "sockets", "threads")

Sample = dict[str, Any]


def soak_config(folder: Path, reward_port: int, metrics_port: int) -> dict[str, Any]:
    """The run that is measured; it would never end by itself."""
    tree = config(folder, reward_port, 10**6, "agents")
    tree["run"] |= {"name": "soak", "save_every": 20, "log_samples": 8, "export": False, "mirror": str(folder / "mirror")}
    tree["run"] |= {"eval_every": 20, "folder": str(folder / "runs")}
    tree["data"]["eval"] = tree["data"]["train"] | {"args": {"rows": 16, "seed": 1}}
    tree["policy"]["optimizer"]["lr"] = 1e-6
    tree["rollout"] |= {"engine": "sglang", "deadlines": {"generate_s": 300, "update_s": 300}}
    tree["resources"]["deadlines"] = {"start_s": 900, "step_s": 300, "save_s": 300}
    tree["trackers"] = {"prometheus": {"port": metrics_port}}
    return tree


def start(log: IO[bytes], *words: str) -> subprocess.Popen[bytes]:
    """Start a command of megarl."""
    return subprocess.Popen([*MEGARL, *words], env=environment(ROOT), stdout=log, stderr=log)


def label(process: psutil.Process) -> str:
    """What a process is, in the words of its command line without folders and numbers."""
    words = [Path(word).name for word in process.cmdline() if not word.startswith("-")] or [process.name()]
    return " ".join(words[:3])[:60]


def measure(process: psutil.Process) -> dict[str, int]:
    """Memory of its own in bytes, and its open files, sockets and threads."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    own_kib = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    kinds = Counter(_is_socket(link) for link in Path(f"/proc/{process.pid}/fd").iterdir())
    return {"memory_bytes": own_kib * 1024, "files": kinds[False], "sockets": kinds[True], "threads": process.num_threads()}


def _is_socket(link: Path) -> bool:
    try:
        return str(link.readlink()).startswith("socket:")
    except FileNotFoundError:  # closed meanwhile
        return False


def look(roots: list[subprocess.Popen[bytes]]) -> dict[str, dict[str, Any]]:
    """Every process below `roots` now, by its id and start."""
    found: dict[str, dict[str, Any]] = {}
    for root in roots:
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(root.pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.Error, OSError):
                    found[f"{process.pid}@{process.create_time():.2f}"] = {"label": label(process)} | measure(process)
    return found


def fetch(*urls: str) -> None:
    """Ask for each page; one that does not answer yet is asked again at the next sample."""
    for url in urls:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as answer:
            answer.read()


def growth(times: list[float], values: list[int]) -> float:
    """Growth from the first to the last time by the Theil-Sen slope."""
    x, y = np.asarray(times), np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(x), 1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    return slope * (times[-1] - times[0])


def judge(samples: list[Sample]) -> dict[str, Any]:
    """Growth of every figure of every process that was there all the time after the warm-up."""
    start_s, end_s = samples[0]["at_s"], samples[-1]["at_s"]
    kept = [sample for sample in samples if sample["at_s"] >= start_s + WARM_UP_SHARE * (end_s - start_s)]
    times = [sample["at_s"] for sample in kept]
    lasting = set.intersection(*(set(sample["processes"]) for sample in kept))
    rows, growing = [], []
    for key in sorted(lasting, key=lambda key: kept[0]["processes"][key]["label"]):
        row: dict[str, Any] = {"process": kept[0]["processes"][key]["label"]}
        for figure in FIGURES:
            values = [sample["processes"][key][figure] for sample in kept]
            grown = growth(times, values)
            allowed = max(MEMORY_BYTES, MEMORY_SHARE * statistics.median(values)) if figure == "memory_bytes" else 1.0
            if figure == "memory_bytes" and row["process"].endswith(PAGE):
                allowed += TIMES_WRITTEN * (kept[-1]["written_bytes"] - kept[0]["written_bytes"])
            row[figure] = {"first": values[0], "last": values[-1], "most": max(values), "growth": round(grown, 2)}
            if grown >= allowed:
                growing.append(f"{row['process']}: {figure} by {grown:.1f}")
        rows.append(row)
    counts = [len(sample["processes"]) for sample in kept]
    return {
        "flat": not growing,
        "growing": growing,
        "after_warm_up_s": [times[0], times[-1]],
        "process_count": {"first": counts[0], "last": counts[-1], "growth": round(growth(times, counts), 2)},
        "written_bytes": kept[-1]["written_bytes"] - kept[0]["written_bytes"],
        "shared_memory_bytes": {"first": kept[0]["shared_memory_bytes"], "last": kept[-1]["shared_memory_bytes"]},
        "ended_or_new_processes": len(set.union(*(set(sample["processes"]) for sample in kept)) - lasting),
        "processes": rows,
    }


def rows_written(run: Path) -> str:
    """Rows of metrics and samples, as the page tells what it has."""
    files = [run / name for name in ("metrics.jsonl", "samples.jsonl")]
    return ".".join(str(file.read_bytes().count(b"\n") if file.exists() else 0) for file in files)


def watch(
    roots: list[subprocess.Popen[bytes]], metrics: str, page: str, minutes: float, every_s: float, run: Path
) -> list[Sample]:
    """Samples from the first step on, for `minutes`; ends early if the run does."""
    began_s, samples, at = None, [], "0.0"
    while roots[0].poll() is None and (began_s is None or time.monotonic() < began_s + 60 * minutes):
        step = last_step(run)
        if began_s is None and step:
            began_s = time.monotonic()
        if began_s is not None:
            fetch(metrics, page, f"{page}rows?at={at}")
            at = rows_written(run)
            memory = sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").iterdir() if path.is_file())
            written = sum((run / name).stat().st_size for name in ROWS if (run / name).exists())
            sample = {"at_s": round(time.monotonic() - began_s, 1), "step": step, "shared_memory_bytes": memory}
            samples.append(sample | {"written_bytes": written, "processes": look(roots)})
            with (run.parent / "samples.jsonl").open("a") as file:  # also of a run that is judged by eye, or was cut off
                file.write(json.dumps(samples[-1]) + "\n")
        time.sleep(every_s)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--every-s", type=float, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder of the run, which is then kept")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        reward = RewardServer(folder, "rewards")
        stack.callback(reward.stop)
        metrics_port, page_port, run = free_port(), free_port(), folder / "runs/soak"
        (folder / "soak.yaml").write_text(yaml.safe_dump(soak_config(folder, reward.port, metrics_port)))
        with (folder / "output.log").open("ab") as log:
            started = [start(log, "train", str(folder / "soak.yaml"))]
            while not run.exists() and started[0].poll() is None:
                time.sleep(1)
            started.append(start(log, "report", str(run), "--watch", "--port", str(page_port)))
            stack.callback(started[1].kill)
            metrics, page = (f"http://127.0.0.1:{port}/" for port in (metrics_port, page_port))
            samples = watch([*started, reward.process], f"{metrics}metrics", page, arguments.minutes, arguments.every_s, run)
            below = psutil.Process(started[0].pid).children(recursive=True) if started[0].poll() is None else []
            started[0].send_signal(signal.SIGINT)
            code = started[0].wait(900)
            left = psutil.wait_procs(below, timeout=LEFT_S)[1]
        steps = [sample["step"] for sample in samples]
        if len(samples) < 10:
            sys.exit(f"the run gave {len(samples)} samples only; see {folder / 'output.log'}")
        report = {"command": sys.argv[1:], "machine": machine(), "versions": versions(), "code": code_of("soak")}
        report |= {"steps": [steps[0], steps[-1]]}
        report |= {"exit_code": code, "processes_left": len(left), "checkpoints": len(list((run / "checkpoints").glob("*")))}
        publish(report | judge(samples), arguments.out)


if __name__ == "__main__":
    main()
