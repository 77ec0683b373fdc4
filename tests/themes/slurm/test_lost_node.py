"""A node of a real Slurm's job is lost: a run with spares goes on at another one, and the job with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from megarl.observe import read_metrics
from tests.themes.multinode.namespaces import Node
from tests.themes.multinode.runs import grpo
from tests.themes.slurm.cluster import Slurm, why_not
from tests.themes.slurm.test_jobs import is_over, steps_of, submit, wait

STEPS = 6


def processes(node: Node) -> dict[int, str]:
    """Command lines on a node by process id."""
    listed = subprocess.run(["ip", "netns", "pids", node.namespace], capture_output=True, text=True, check=True).stdout
    found = {}
    for pid in map(int, listed.split()):
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def lose(slurm: Slurm, node: Node) -> None:
    """End everything on a node at once, Slurm's own process too, and have Slurm know it."""
    for pid in processes(node):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    slurm.run("scontrol", "update", f"nodename={node.name}", "state=down", "reason=lost")


@pytest.mark.slow
def test_a_job_with_spares_outlives_a_lost_node(tiny_model: Path, tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm here: {reason}")
    config, run = grpo(tmp_path, tiny_model, steps=STEPS), tmp_path / "runs" / "grpo"
    tree = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(tree | {"resources": {"spares": 1}}))
    with Slurm(3) as slurm:
        job = submit(slurm, config, "--local-folder", str(slurm.local), nodes=3)
        wait(lambda: len(steps_of(run)) >= 2 or is_over(slurm, job), run, 400)
        other, *_ = [node for node in slurm.nodes[1:] if any("ray::RankProcess" in line for line in processes(node).values())]
        lose(slurm, other)
        wait(lambda: is_over(slurm, job), run, 400)
        ends = [line for line in slurm.finished() if line["JobId"] == job]
    assert [end["JobState"] for end in ends] == ["RESIZING", "COMPLETED"]  # to the nodes that are left
    said = (run / "jobs" / f"{job}.txt").read_text()
    assert re.search(r"rank.* lost .*replaced, and the step is computed again from memory", said), said
    assert "the run left with exit code 0" in said
    assert steps_of(run) == [*range(1, STEPS + 1)]
    assert sum(row.get("recovery/replaced_ranks", 0) for row in read_metrics(run / "metrics.jsonl")) >= 1
