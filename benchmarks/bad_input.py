"""Bad input of every kind: each case must exit 2 with one sentence, write nothing, and leave no process behind.

    python benchmarks/bad_input.py --json benchmarks/results/bad_input.json

The command line runs in a forked child of this one warmed process, in a folder of its own (an import of megarl per case would
cost seconds). HTTP answers come from a server in the child, and what a run would do with them goes the same way as `megarl`'s
errors. The models/tiny-arithmetic folder must be there (`make tiny-model`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # a process with threads must not be forked
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
KINDS = ("config", "data", "model", "http", "cli")
MARK = "MEGARL_BAD_INPUT_CASE"
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a case did; `faults` is empty if it did what it must."""

    kind: str
    name: str
    exit_code: int
    said: str
    seconds: float
    faults: list[str]


def warm_up() -> None:
    """Import and call what the cases do, so that children have it; afterwards this process still has one thread."""
    import contextlib
    import io

    import megarl.cli.plan
    import megarl.convert.run
    import megarl.data.inspect
    import megarl.rewards.server
    import megarl.trainers.evaluate
    import megarl.trainers.generate
    import megarl.trainers.rl.train
    import megarl.trainers.supervised.train  # noqa: F401
    from benchmarks.bad_input_cases import WARM_UP
    from megarl.cli import main

    here = Path.cwd()
    for prepare in WARM_UP:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            what = prepare(Path(folder))
            os.chdir(folder)
            main(list(what))
            os.chdir(here)


def run_case(kind: str, name: str, prepare: Callable[[Path], Sequence[str] | Callable[[], int]]) -> Outcome:
    """Run one case in a child and look at what it said and left."""
    with tempfile.TemporaryDirectory(prefix="bad-input-") as place:
        folder, said = Path(place) / "work", Path(place) / "stderr"
        folder.mkdir()
        what = prepare(folder)
        before = _files(folder)
        mark = f"{MARK}={uuid.uuid4()}"
        started = time.perf_counter()
        pid = os.fork()
        if not pid:
            _child(what, folder, said, mark)
        code = _wait(pid)
        seconds = time.perf_counter() - started
        left = _processes(mark)
        text = said.read_text(errors="replace") if said.exists() else ""
        faults = _faults(code, text, sorted(_files(folder) - before), left)
        for leftover in left:
            os.kill(leftover, signal.SIGKILL)
    plain = text.replace(str(ROOT), ".").replace(place, "…")[:500]
    shown = name.replace(str(ROOT), ".").encode(errors="replace").decode()
    return Outcome(kind, shown, code, plain, round(seconds, 3), faults)


def _child(what: Sequence[str] | Callable[[], int], folder: Path, said: Path, mark: str) -> None:
    """Never returns: the command line in this forked process, its output in files."""
    code = 99
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update([mark.split("=", 1)])
        for number, path in ((0, os.devnull), (1, os.devnull), (2, str(said))):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
        from megarl.cli.commands import main, reported

        code = reported(what) if callable(what) else main(list(what))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - that is what a traceback at the user's would be
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    """The child's exit code; 124 if it had to be killed."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 124


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def _processes(mark: str) -> list[int]:
    """Processes that have `mark` in the environment they were started with; they may need a moment to end."""
    until = time.monotonic() + 2.0
    while True:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (place / "environ").read_bytes():
                    found.append(int(place.name))
            except OSError:  # gone, or another user's
                continue
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def _faults(code: int, said: str, written: list[str], left: list[int]) -> list[str]:
    faults = []
    if code != 2:
        faults.append(f"exit code {code}")
    if said.count("\n") != 1 or not said.startswith("megarl: "):
        faults.append(f"{said.count(chr(10))} lines on stderr instead of one sentence")
    if "Traceback" in said:
        faults.append("a traceback")
    if written:
        faults.append(f"wrote {', '.join(written[:5])}")
    if left:
        faults.append(f"left {len(left)} processes")
    return faults


def measure(seed: int, count: int | None, kinds: Sequence[str]) -> list[Outcome]:
    """The first `count` cases (None: all) of `kinds` in turn."""
    from benchmarks.bad_input_cases import all_cases

    assert threading.active_count() == 1, f"threads before the first fork: {threading.enumerate()}"
    outcomes = []
    for case in [case for case in all_cases(seed) if case.kind in kinds][:count]:
        outcomes.append(run_case(case.kind, case.name, case.prepare))
        if len(outcomes) % 25 == 0:
            print(f"{len(outcomes)} cases", flush=True)
        if faults := outcomes[-1].faults:
            said = outcomes[-1].said.strip()[-400:]
            print(f"{case.kind}: {outcomes[-1].name}: {'; '.join(faults)}\n    {said}", flush=True)
    return outcomes


def main() -> int:
    """Run the cases; returns 1 if any did not do what it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=None, help="only the first so many, which are of all kinds")
    parser.add_argument("--seed", type=int, default=0, help="of what is fuzzed")
    parser.add_argument("--json", type=Path, default=None, help="file for the result")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these")
    arguments = parser.parse_args()
    from benchmarks.measured_code import code_of

    warm_up()
    started = time.perf_counter()
    outcomes = measure(arguments.seed, arguments.cases, arguments.kinds)
    bad = [outcome for outcome in outcomes if outcome.faults]
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", "benchmarks/bad_input.py", *sys.argv[1:]]),
        "code": code_of("bad_input"),
        "versions": _versions(),
        "cases": len(outcomes),
        "by_kind": dict(Counter(outcome.kind for outcome in outcomes)),
        "as_they_must": len(outcomes) - len(bad),
        "seconds": round(time.perf_counter() - started, 1),
        "faults": [asdict(outcome) for outcome in bad],
        "said": {f"{outcome.kind}: {outcome.name}": outcome.said.strip() for outcome in outcomes},
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['as_they_must']} of {len(outcomes)} as they must, in {result['seconds']} s: {result['by_kind']}")
    return 1 if bad else 0


def _versions() -> dict[str, str | None]:
    from megarl.observe.summary import versions

    return {
        name: version for name, version in versions().items() if name in ("megarl", "python", "torch", "ray", "transformers")
    } | {"system": platform.system()}


if __name__ == "__main__":
    sys.exit(main())
