"""The scripts in pods, as real processes: a run is warned once, whoever warns it, and its exit code is its pod's.

`megarl`, `ray` and `torchrun` are stand-ins that keep what they were told.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.launch.pod_job import scripts

SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))
MEGARL = f"""#!{sys.executable} -SE
import os, pathlib, signal, sys, time
kept = pathlib.Path(os.environ["KEPT"])
def keep(name, line):
    with open(kept / name, "a") as file:
        print(line, file=file)
keep("megarl", " ".join(sys.argv[1:]))
if sys.argv[1] != "train":
    sys.exit()
def warned(number, frame):
    keep("warnings", signal.Signals(number).name)
    if not (kept / "deaf").exists():
        sys.exit(75)
signal.signal(signal.SIGUSR1, warned)
signal.signal(signal.SIGTERM, warned)
(kept / "listens").touch()
for _ in range(600):
    if (kept / "end").exists():
        sys.exit(int((kept / "end").read_text()))
    time.sleep(0.05)
"""
TORCHRUN = """#!/bin/bash
echo "$*" >>"$KEPT/torchrun"
while [[ $1 != --no-python ]]; do shift; done
shift
RANK=0 "$@" && exit 0
exit 1
"""
RAY = """#!/bin/bash
echo "$RAY_AUTH_MODE $(<"$RAY_AUTH_TOKEN_PATH") $*" >>"$KEPT/ray"
[[ $* == *--block* ]] || exit 0
trap 'echo ended >>"$KEPT/ray"; exit 0' TERM
while [[ ! -e $KEPT/ray_ends ]]; do sleep 0.05 & wait $!; done
"""


class Pod:
    """A folder of scripts as a pod has it, and what was started there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.kept = folder, folder / "files", folder / "kept"
        self.run, self.job = folder / "run", folder / "run/jobs/big.1"
        for made in (self.files, self.kept, self.run, folder / "bin"):
            made.mkdir()
        for name, text in scripts().items():
            (self.files / name).write_text(text)
        for name, text in (("megarl", MEGARL), ("torchrun", TORCHRUN), ("ray", RAY)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.processes: list[subprocess.Popen[str]] = []
        self.tell()

    def tell(self, launcher: str = "ray", limit_s: int = 1000, replaces_ranks: str = "no", ended: str = "") -> None:
        """Write what the scripts are told."""
        (self.files / "job.sh").write_text(
            f"workdir={self.folder}\nrun={self.run}\njob=$run/jobs/big.$MEGARL_START\nlauncher={launcher}\nnodes=2\ngpus=8\n"
            f"ended={ended}\nranks_per_node=8\nlimit_s={limit_s}\nstart_s=20\nreplaces_ranks={replaces_ranks}\n"
            'ray_options=(--num-cpus=64 --num-gpus=8)\narguments=("$files/run.yaml" data.system_prompt="two words")\n'
            "resume=auto\n"
        )

    def start(self, script: str, **environment: str) -> subprocess.Popen[str]:
        """Start a script as a pod does, in a process group of its own."""
        told = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "KEPT": str(self.kept), "MEGARL_START": "1", "MEGARL_LOOK_S": "0.1"}
        started = subprocess.Popen(
            ["bash", str(self.files / script)], env={**told, **environment}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.processes.append(started)
        return started

    def until(self, what: Callable[[], bool]) -> None:
        """Wait until something is so."""
        for _ in range(600):
            if what():
                return
            time.sleep(0.05)
        pytest.fail("it did not come about")

    def said(self, name: str) -> list[str]:
        """The lines that a stand-in kept."""
        path = self.kept / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    """A pod whose processes are ended with the test."""
    made = Pod(tmp_path)
    yield made
    for process in made.processes:
        for group in (process.pid, *_children(process.pid)):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def _children(pid: int) -> list[int]:
    """Processes whose session is that of `pid`: a script's own jobs are process groups of theirs."""
    listed = subprocess.run(["ps", "-o", "pgid=", "-s", str(pid)], capture_output=True, text=True, check=False).stdout
    return sorted({int(word) for word in listed.split()})


@pytest.mark.parametrize("name", sorted(scripts()))
def test_scripts_are_clean_shell(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(scripts()[name])
    done = subprocess.run([SHELLCHECK, str(tmp_path / name)], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def test_there_are_the_scripts_that_manifests_name() -> None:
    assert sorted(scripts()) == ["driver.sh", "node.sh", "rank.sh", "warn.sh"]


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_exit_code_of_a_run_is_that_of_its_pod(code: int, pod: Pod) -> None:
    (pod.kept / "end").write_text(str(code))
    driver = pod.start("driver.sh")
    assert driver.wait(30) == code
    assert pod.said("megarl") == [f"train {pod.files}/run.yaml data.system_prompt=two words run.resume=auto"]
    assert (pod.job / "left").exists()


@pytest.mark.parametrize(("code", "starts"), [(0, 2), (2, 1), (75, 2), (137, 2)])
def test_a_run_that_ended_is_not_started_again_by_kuberay(code: int, starts: int, pod: Pod) -> None:
    """KubeRay has no exit code with which a job is over: whatever fails is tried again."""
    pod.tell(ended="$run/jobs/big.1a2b.ended")
    (pod.kept / "end").write_text(str(code))
    assert [pod.start("driver.sh", MEGARL_START=start).wait(30) for start in ("1", "2")] == [code, code]
    assert len(pod.said("megarl")) == starts
    pod.tell(ended="$run/jobs/big.3c4d.ended")  # another submission
    assert pod.start("driver.sh", MEGARL_START="3").wait(30) == code
    assert len(pod.said("megarl")) == starts + 1


@pytest.mark.parametrize("by", ["SIGTERM", "its group", "a pod", "time"])
def test_a_run_is_warned_once_and_leaves_with_75(by: str, pod: Pod) -> None:
    pod.tell(limit_s=2 if by == "time" else 1000)
    driver = pod.start("driver.sh")
    pod.until((pod.kept / "listens").exists)
    if by == "SIGTERM":
        driver.send_signal(signal.SIGTERM)
    elif by == "its group":  # as `ray job stop` does: the run must not hear a second signal
        os.killpg(driver.pid, signal.SIGTERM)
    elif by == "a pod":
        assert pod.start("warn.sh").wait(30) == 0
    assert driver.wait(30) == 75
    assert pod.said("warnings") == ["SIGUSR1"]


def test_a_pod_that_goes_stays_until_the_run_has_saved_and_then_tells_it_no_more(pod: Pod) -> None:
    (pod.kept / "deaf").touch()
    driver = pod.start("driver.sh")
    pod.until((pod.kept / "listens").exists)
    going = pod.start("warn.sh")
    pod.until(lambda: pod.said("warnings") == ["SIGUSR1"])
    driver.send_signal(signal.SIGTERM)  # what kubelet sends behind preStop, and at the end of the grace
    time.sleep(1)
    assert going.poll() is None
    assert pod.said("warnings") == ["SIGUSR1"]
    (pod.kept / "end").write_text("75")
    assert driver.wait(30) == 75
    assert going.wait(30) == 0


def test_a_pod_goes_at_once_where_nothing_is_to_be_saved(pod: Pod) -> None:
    assert pod.start("warn.sh").wait(10) == 0  # before the run
    (pod.kept / "end").write_text("0")
    pod.start("driver.sh").wait(30)
    assert pod.start("warn.sh").wait(10) == 0  # behind it
    assert not (pod.job / "warned").exists()


def test_a_pod_does_not_wait_for_a_driver_that_was_killed(pod: Pod) -> None:
    driver = pod.start("driver.sh")
    pod.until((pod.kept / "listens").exists)
    driver.kill()
    driver.wait()
    assert pod.start("warn.sh", MEGARL_SILENT_S="2").wait(20) == 0


def test_a_run_with_spares_is_warned_of_its_head_alone(pod: Pod) -> None:
    pod.tell(replaces_ranks="yes")
    driver = pod.start("driver.sh")
    pod.until((pod.kept / "listens").exists)
    assert pod.start("warn.sh").wait(10) == 0
    assert not (pod.job / "warned").exists()
    assert pod.start("warn.sh", MEGARL_IS_HEAD="yes").wait(30) == 0
    assert driver.wait(30) == 75


def test_ranks_of_torchrun_that_stopped_are_exit_code_75(pod: Pod) -> None:
    pod.tell(launcher="torchrun")
    driver = pod.start("driver.sh", MEGARL_RANK="0", MEGARL_HEAD="big-node-0-0.big")
    pod.until((pod.kept / "listens").exists)
    assert "--nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=big-node-0-0.big" in pod.said("torchrun")[0]
    pod.start("warn.sh")
    assert driver.wait(30) == 75
    assert pod.said("warnings") == ["SIGUSR1"]
    for file in pod.kept.iterdir():
        file.unlink()
    (pod.kept / "end").write_text("2")  # a start behind it does not hear of the one before
    assert pod.start("driver.sh", MEGARL_RANK="0", MEGARL_HEAD="h").wait(30) == 1


def test_a_run_goes_on_from_its_checkpoints(pod: Pod) -> None:
    told = pod.files / "job.sh"
    told.write_text(told.read_text().replace("resume=auto", "resume=/old/step_5"))
    (pod.kept / "end").write_text("0")
    pod.start("driver.sh").wait(30)
    (pod.run / "checkpoints").mkdir()
    pod.start("driver.sh").wait(30)
    assert [line.split()[-1] for line in pod.said("megarl")] == ["run.resume=/old/step_5", "run.resume=auto"]


def test_nodes_join_the_head_by_its_token_and_leave_with_it(pod: Pod) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        port = str(listening.getsockname()[1])
        told = {"MEGARL_HEAD": "127.0.0.1", "MEGARL_RAY_PORT": port, "MEGARL_NODE_ADDRESS": "127.0.0.1"}
        node = pod.start("node.sh", MEGARL_RANK="1", **told)
        time.sleep(0.5)
        assert pod.said("ray") == []  # there is no token yet
        head = pod.start("node.sh", MEGARL_RANK="0", **told)
        pod.until(lambda: len(pod.said("ray")) == 2 and (pod.kept / "listens").exists())
        assert (pod.job / "ray_token").stat().st_mode & 0o77 == 0
        started, joined = (line.split() for line in pod.said("ray"))
        assert started[:2] == joined[:2]
        assert (started[0], len(started[1])) == ("token", 64)
        assert started[2:] == [
            "start", "--head", f"--port={port}", "--num-cpus=64", "--num-gpus=8", "--disable-usage-stats",
            "--node-ip-address=127.0.0.1",
        ]  # fmt: skip
        assert joined[2:5] == ["start", f"--address=127.0.0.1:{port}", "--block"]
        assert pod.said("megarl")[0].startswith(f"node wait-for-ray --address 127.0.0.1:{port} --nodes 2 --gpus 8")
        (pod.kept / "end").write_text("75")
        assert head.wait(30) == 75
        assert not (pod.job / "ray_token").exists()
        assert node.poll() is None
    assert node.wait(30) == 0
    assert pod.said("ray")[-1] == "ended"


def test_a_node_whose_ray_ends_before_the_heads_fails(pod: Pod) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        pod.job.mkdir(parents=True)
        (pod.job / "ray_token").write_text("x")
        told = {"MEGARL_HEAD": "127.0.0.1", "MEGARL_RAY_PORT": str(listening.getsockname()[1])}
        node = pod.start("node.sh", MEGARL_RANK="1", MEGARL_NODE_ADDRESS="127.0.0.1", **told)
        pod.until(lambda: len(pod.said("ray")) == 1)
        (pod.kept / "ray_ends").touch()
        assert node.wait(30) == 1
