"""Which failures of a run are begun again, from where, how often, and what is left of them: with runs that do nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

PROGRAM = """
import os, signal, subprocess, sys, tempfile, time
from pathlib import Path
from megarl import errors
from megarl.config import parse_config
from megarl.observe.phases import Phases
from megarl.supervise import child_run, restarts, watched_run

folder, behaviour, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[4]
most_restarts, ahead_s = int(sys.argv[3]), float(sys.argv[5])
now = time.time
time.time = lambda: now() + ahead_s
restarts.FIRST_WAIT_S = 0.1
child_run.BEAT_S, watched_run.SILENT_S, watched_run.TEARDOWN_S = 0.1, 2.0, 2.0

def train(config):
    tries = folder / "tries"
    number = len(tries.read_text().split()) if tries.exists() else 0
    with tries.open("a") as file:
        file.write(config.run.resume + " ")
    tempfile.mkstemp()
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp()"])
    (folder / f"restart-{number}").write_text(str(child_run.is_restart()))
    fail(number, -1)
    phases = Phases()
    child_run.follow(phases)
    (folder / f"child-{number}").write_text(str(subprocess.Popen(["sleep", "600"], stderr=subprocess.DEVNULL).pid))
    with phases("start"):
        time.sleep(0.05)
    for step in range(2):
        with phases.step(), phases("update"):
            fail(number, step)
    with phases("save"):
        (folder / "runs" / "run" / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)
    with phases("export"):
        fail(number, 2)

def fail(number, step):
    what, _, when = behaviour.partition("@")
    tries, at = (int(part) for part in when.split(","))
    if number >= tries or step != at:
        return
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(1)
    if what == "stuck":  # lives, but its signs of life stop
        child_run._report._tell = lambda said: None
        time.sleep(600)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "sleep":
        (folder / "sleeps").touch()
        time.sleep(600)
    if what in ("hang", "mistake"):  # fails, and then its world does not let it go
        kind = errors.WorkerError if what == "hang" else errors.RewardError
        child_run.report_end(kind("rank 3 of policy died"))
        time.sleep(600)
    error = getattr(errors, what)("something happened")
    error.who = "rank 1 of policy"
    raise error

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell starts programs in the background
    tree = {"run": {"folder": str(folder / "runs"), "max_restarts": most_restarts, "resume": resume}, "model": {"path": "m"}}
    tree["data"] = {"train": {"source": "jsonl", "path": "rows.jsonl"}}
    tree["rewards"] = [{"name": "exact_number"}]
    try:
        sys.exit(restarts.run_with_restarts(parse_config(tree), train))
    except errors.MegarlError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\\n")
        sys.exit(75 if isinstance(error, errors.RunStopped) else 2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def start(
    folder: Path, behaviour: str, restarts: int, resume: str = "never", clock_is_ahead_s: float = 0.0
) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), str(folder), behaviour, str(restarts), resume, str(clock_is_ahead_s)]
    (folder / "t").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folder / "t")}
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)


def run(folder: Path, behaviour: str, restarts: int = 3, **further: Any) -> tuple[int, list[str], list[dict[str, Any]], str]:
    """Exit code, `run.resume` of every attempt, the lines of faults.jsonl, what was said."""
    process = start(folder, behaviour, restarts, **further)
    _, said = process.communicate(timeout=60)
    assert (folder / "tries").exists(), said
    faults = folder / "runs" / "run" / "faults.jsonl"
    lines = [json.loads(line) for line in faults.read_text().splitlines()] if faults.exists() else []
    return process.returncode, (folder / "tries").read_text().split(), lines, said


def wait_for(path: Path) -> None:
    ends_at = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def nothing_is_left(folder: Path) -> bool:
    alive = [path.name for path in folder.glob("child-*") if psutil.pid_exists(int(path.read_text()))]
    return not alive and not list((folder / "t").iterdir())


def test_a_fault_is_written_behind_the_whole_lines_that_an_earlier_start_left(tmp_path: Path) -> None:
    faults = tmp_path / "runs" / "run" / "faults.jsonl"
    faults.parent.mkdir(parents=True)
    faults.write_bytes(b'{"who": "driver"}\n{"who": "rank \xff')
    _, _, lines, said = run(tmp_path, "kill@1,1", restarts=1)
    assert [line["who"] for line in lines] == ["driver", "driver"], said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "phase", "who", "what"),
    [
        ("WorkerError@2,1", "update", "rank 1 of policy", "something happened"),
        # WorkerError before it is raised and told alike
        pytest.param("EngineError@2,1", "update", "rank 1 of policy", "something happened", marks=pytest.mark.exhaustive),
        pytest.param("MirrorError@2,1", "update", "rank 1 of policy", "something happened", marks=pytest.mark.exhaustive),
        ("kill@2,0", "update", "driver", "it was killed by SIGKILL"),
        ("kill@2,2", "export", "driver", "it was killed by SIGKILL"),
        # as a kill, only said in other words
        pytest.param("exit@2,1", "update", "driver", "it ended with exit code 1", marks=pytest.mark.exhaustive),
        ("stuck@2,1", "update", "driver", "it gave no heartbeat for 2 s; its Python stacks are in"),
        pytest.param(
            *("stop@2,1", "update", "driver", "it was stopped (SIGSTOP) for 2 s; it gave no Python stacks"),
            marks=pytest.mark.exhaustive,  # the one before is as silent
        ),
        ("hang@2,1", "update", "driver", "rank 3 of policy died"),
    ],
)
def test_what_is_nobodys_mistake_is_begun_again_and_written_down(
    tmp_path: Path, behaviour: str, phase: str, who: str, what: str
) -> None:
    code, resumes, faults, said = run(tmp_path, behaviour)
    assert code == 0, said
    assert resumes == ["never", "auto", "auto"]
    assert [(tmp_path / f"restart-{number}").read_text() for number in range(3)] == ["False", "True", "True"]
    assert [(fault["phase"], fault["who"], fault["attempt"]) for fault in faults] == [(phase, who, 1), (phase, who, 2)]
    assert all(fault["what"].startswith(what) for fault in faults)
    first, last = faults
    done = int(behaviour[-1])
    assert [fault["steps_done"] for fault in faults] == [done, done]
    # it doubles where an attempt did not get as far as a step
    assert (first["wait_s"], last["wait_s"]) == ((0.1, 0.1) if done else (0.1, 0.2))
    assert last["recovered_s"] >= last["wait_s"]
    assert (first["recovered_s"] is None) == (done == 0)
    origin = "continues from" if done == 2 else "begins anew (there is no checkpoint yet)"
    assert f"restart 1 of 3 in 0 s {origin}" in said
    stacks = tmp_path / "runs" / "run" / "logs" / "stacks" / "driver.txt"
    assert ("in fail" in stacks.read_text()) if behaviour.startswith("stuck") else not stacks.exists()
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("error", ["ConfigError", "RewardError", "GuardError"])
def test_what_the_user_did_wrong_is_never_begun_again(tmp_path: Path, error: str) -> None:
    code, resumes, faults, said = run(tmp_path, f"{error}@1,1")
    assert (code, resumes, faults) == (2, ["never"], [])
    assert said == f"{error}: something happened\n"
    assert not (tmp_path / "runs").exists()
    assert nothing_is_left(tmp_path)


def test_a_mistake_is_said_though_the_run_is_killed_as_it_does_not_end(tmp_path: Path) -> None:
    code, resumes, faults, said = run(tmp_path, "mistake@1,1")
    assert (code, resumes, faults) == (2, ["never"], [])
    assert said == (
        "WorkerError: rank 3 of policy died; its processes did not end by themselves after that, and were killed by SIGKILL\n"
    )
    assert nothing_is_left(tmp_path)


def test_what_never_worked_is_taken_for_the_users_mistake(tmp_path: Path) -> None:
    assert run(tmp_path, "RewardServerError@1,0")[:3] == (2, ["never"], [])


def test_it_is_begun_again_no_more_often_than_the_config_says(tmp_path: Path) -> None:
    code, resumes, faults, said = run(tmp_path, "kill@9,1", restarts=2)
    assert code == 2
    assert len(resumes) == len(faults) == 3
    assert [fault["wait_s"] for fault in faults] == [0.1, 0.1, None]
    assert "WorkerError: the run failed for the 3rd time in phase 'update', driver: it was killed by SIGKILL" in said
    assert "run.max_restarts is 2" in said


def test_a_run_that_was_killed_before_it_began_may_still_be_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "kill@1,-1")[:2] == (0, ["never", "never"])


@pytest.mark.slow
@pytest.mark.parametrize("clock_is_ahead_s", [pytest.param(0.0, marks=pytest.mark.exhaustive), 86_400.0])
def test_a_named_checkpoint_counts_until_the_run_has_one_whatever_the_clock_says(
    tmp_path: Path, clock_is_ahead_s: float
) -> None:
    named = str(tmp_path / "another" / "step_000007")
    for when, resumes in (("1,1", [named, named]), ("1,2", [named, "auto"])):
        folder = tmp_path / when
        folder.mkdir()
        assert run(folder, f"kill@{when}", resume=named, clock_is_ahead_s=clock_is_ahead_s)[:2] == (0, resumes)


def test_without_restarts_nothing_stands_between_the_caller_and_the_run(tmp_path: Path) -> None:
    code, resumes, faults, _ = run(tmp_path, "kill@1,1", restarts=0)
    assert (code, resumes, faults) == (-signal.SIGKILL, ["never"], [])
    psutil.Process(int((tmp_path / "child-0").read_text())).kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_and_ends_the_run_for_good(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start(tmp_path, "sleep@9,1", 3)
    wait_for(tmp_path / "sleeps")
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code, said
    assert (tmp_path / "tries").read_text().split() == ["never"]
    assert nothing_is_left(tmp_path)


def test_all_that_a_run_started_ends_with_the_process_that_watches_it(tmp_path: Path) -> None:
    process, stranger = start(tmp_path, "sleep@9,1", 3), subprocess.Popen(["sleep", "600"])
    try:
        wait_for(tmp_path / "sleeps")
        below = psutil.Process(process.pid).children(recursive=True)
        assert int((tmp_path / "child-0").read_text()) in [child.pid for child in below]
        process.kill()
        process.communicate(timeout=30)
        _, alive = psutil.wait_procs(below, timeout=20)
        assert alive == []
        ends_at = time.monotonic() + 60
        while list((tmp_path / "t").iterdir()):
            assert time.monotonic() < ends_at
            time.sleep(0.05)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_second_run_in_the_folder_is_refused_while_the_first_lives_and_begins_at_once_when_it_is_killed(
    tmp_path: Path,
) -> None:
    first = start(tmp_path, "sleep@1,1", restarts=3)
    wait_for(tmp_path / "sleeps")
    second = start(tmp_path, "sleep@0,0", restarts=3, resume="auto")
    _, said = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"{tmp_path / 'runs' / 'run'} belongs to a run that is alive: process {first.pid} of" in said
    assert f"`kill {first.pid}`" in said
    assert (tmp_path / "tries").read_text().split() == ["never"]
    first.kill()
    first.communicate(timeout=60)
    code, tries, _, said = run(tmp_path, "sleep@0,0", resume="auto")
    assert (code, tries) == (0, ["never", "auto"])
    assert not (tmp_path / "runs" / "run" / "owner.json").exists()


def test_a_run_whose_folder_is_taken_from_it_ends_with_all_that_it_started_and_is_not_begun_again(tmp_path: Path) -> None:
    first = start(tmp_path, "sleep@1,1", restarts=3)
    wait_for(tmp_path / "sleeps")
    (tmp_path / "runs" / "run" / "owner.json").unlink()
    _, said = first.communicate(timeout=60)
    assert first.returncode == 2
    assert "OwnerError: " in said
    assert "was removed" in said
    assert (tmp_path / "tries").read_text().split() == ["never"]
    assert not (tmp_path / "runs" / "run" / "faults.jsonl").exists()
    assert nothing_is_left(tmp_path)


def test_what_watches_a_run_is_small() -> None:
    program = (
        "import sys, megarl.cli, megarl.supervise.restarts; print(*{'torch', 'ray', 'sglang', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == []
