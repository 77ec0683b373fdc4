"""On a real Slurm: a run over two nodes is warned, put back and finishes; what cannot run never reaches the queue."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.observe import read_metrics
from tests.themes.multinode.runs import CPU_NODES, grpo, sft
from tests.themes.slurm.cluster import Slurm

MEGARL = str(Path(sys.executable).with_name("megarl"))


def submit(slurm: Slurm, config: Path, *words: str, nodes: int = 2) -> str:
    """Submit from the login node; returns the job's number."""
    said = slurm.run(MEGARL, "submit", "slurm", str(config), *CPU_NODES, *words)
    found = re.match(rf"job (\d+): {nodes} nodes; the script is ", said)
    assert found is not None, said
    return found[1]


def refused(slurm: Slurm, config: Path, *words: str) -> str:
    command = slurm.login.command(MEGARL, "submit", "slurm", str(config), *CPU_NODES, *words)
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done
    return done.stderr


def wait(condition: Callable[[], object], run: Path, seconds: float) -> None:
    """Wait for `condition`; what the job wrote is in the failure."""
    ends_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends_at:
            logs = [*run.glob("jobs/*.txt"), *run.glob("jobs/*/logs/*.txt")]
            pytest.fail("\n".join(f"== {log}\n{log.read_text()[-2000:]}" for log in sorted(logs)))
        time.sleep(0.2)


def is_over(slurm: Slurm, job: str) -> bool:
    return not slurm.run("squeue", "--noheader", f"--jobs={job}", check=False)


def steps_of(run: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_over_two_nodes_is_warned_put_back_and_finishes(slurm: Slurm, tiny_model: Path, tmp_path: Path) -> None:
    config, run = grpo(tmp_path, tiny_model, steps=5), tmp_path / "runs" / "grpo"
    job = submit(slurm, config)
    wait(lambda: steps_of(run) or is_over(slurm, job), run, 240)
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1 sends before the time limit
    wait(lambda: is_over(slurm, job), run, 240)
    starts = [line for line in slurm.finished() if line["JobId"] == job]
    assert [start["JobState"] for start in starts] == ["PENDING", "COMPLETED"]  # once put back, then done
    assert {start["NodeList"] for start in starts} == {"n[1-2]"}
    said = (run / "jobs" / f"{job}.txt").read_text()
    stopped = re.search(r"megarl: stopped by SIGUSR1 after step (\d) of 5", said)
    assert stopped is not None, said
    assert "the run left with exit code 75" in said
    assert "the run left with exit code 0" in said
    assert steps_of(run) == [1, 2, 3, 4, 5]  # no step is done twice or lost
    for start in (0, 1):
        nodes = run / "jobs" / f"{job}.{start}" / "nodes"
        assert sorted(path.name for path in nodes.iterdir()) == ["agreed.sh", "n1.json", "n2.json"]
    assert not list(Path("/tmp").glob(f"megarl-{job}*"))  # caches are gone


@pytest.mark.slow
def test_torchrun_s_ranks_are_one_world_over_two_nodes(slurm: Slurm, tiny_model: Path, tmp_path: Path) -> None:
    config, run = sft(tmp_path, tiny_model, steps=2), tmp_path / "runs" / "sft"
    job = submit(slurm, config)
    wait(lambda: is_over(slurm, job), run, 240)
    assert "the run left with exit code 0" in (run / "jobs" / f"{job}.txt").read_text()
    assert steps_of(run) == [1, 2]
    assert len(list((run / "jobs" / f"{job}.0" / "logs").glob("torchrun-*.txt"))) == 2


def test_preflight_asks_the_cluster_and_two_of_its_nodes(slurm: Slurm, tiny_model: Path, tmp_path: Path) -> None:
    config = grpo(tmp_path, tiny_model, steps=2)
    said = slurm.run(MEGARL, "submit", "slurm", str(config), *CPU_NODES, "--preflight")
    assert "tiny: 2 nodes, 0 GPUs each" in said
    for node in slurm.nodes:
        assert re.search(rf"^{node.name} .*eth0 {re.escape(node.address)}", said, re.M), said
    assert not (tmp_path / "runs" / "grpo" / "metrics.jsonl").exists()
    assert slurm.run("squeue", "--noheader") == ""


def test_what_cannot_run_never_reaches_the_queue(slurm: Slurm, tiny_model: Path, tmp_path: Path) -> None:
    config = grpo(tmp_path, tiny_model, steps=2)
    before = slurm.run("squeue", "--noheader")
    assert "partition is 'tny', but the cluster has closed, tiny (did you mean 'tiny'?)" in refused(
        slurm, config, "--partition", "tny"
    )
    assert "partition 'closed' is down; it must be tiny" in refused(slurm, config, "--partition", "closed")
    assert "partition 'tiny' ends jobs after 00:30:00; ask for" in refused(slurm, config, "--time", "02:00:00")
    assert "the job needs 4 nodes, but partition 'tiny' has 2" in refused(slurm, config, "policy.layout.dp=4")
    assert "no such file" in refused(slurm, config, "--runtime", "apptainer", "--image", "/none.sif")
    assert slurm.run("squeue", "--noheader") == before


def test_doctor_sees_both_nodes_of_an_allocation(slurm: Slurm, tmp_path: Path) -> None:
    said = slurm.run("salloc", "--nodes=2", "--quiet", MEGARL, "doctor", "--cluster", "--shared", str(tmp_path), check=False)
    for node in slurm.nodes:
        assert re.search(rf"^{node.name} .*[+-]0\.0\d\d s .* GB/s .* µs", said, re.M), said
    assert re.search(r"interface +eth0", said)
