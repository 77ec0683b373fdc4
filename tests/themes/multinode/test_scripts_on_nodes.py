"""The scripts for PBS and LSF on two network namespaces: Ray over both, and a torchrun world over both.

The batch systems are not here: `pbsdsh` and `blaunch` are stand-ins that enter a namespace, everything they start is real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.observe import read_metrics
from tests.themes.multinode.namespaces import Network
from tests.themes.multinode.runs import CPU_NODES, grpo, sft

ENTER = 'namespaces=({namespaces})\nexec nsenter "--net=/run/netns/${{namespaces[$number]}}" "$@"\n'
STAND_INS = {
    "pbsdsh": '#!/bin/bash\nnumber=$2\nshift 3 # -n NUMBER --\n',
    "blaunch": '#!/bin/bash\nnumber=$((${1#n} - 1))\nshift # its name is n1, n2, ...\n',
}  # fmt: skip


def run_script(system: str, config: Path, network: Network, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Render the job, start it on the first node as the batch system would, and return what it said."""
    assert main(["submit", system, str(config), *CPU_NODES, "--venv", sys.prefix, "--dry-run"]) == 0
    script = folder / f"{system}.sh"
    script.write_text(capsys.readouterr().out)
    programs = folder / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text + ENTER.format(namespaces=" ".join(node.namespace for node in network.nodes)))
        (programs / name).chmod(0o755)
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{node.name}\n" for node in network.nodes))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))} | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PBS_JOBID": f"{os.getpid()}.here", "PBS_NODEFILE": str(hosts),
        "LSB_JOBID": str(os.getpid()), "LSB_DJOB_HOSTFILE": str(hosts),
    }  # fmt: skip
    job = network.nodes[0].start("bash", str(script), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        said, _ = job.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        job.terminate()
        said, _ = job.communicate(timeout=30)
    logs = "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(folder.glob("runs/*/jobs/*/logs/*.txt")))
    assert job.returncode == 0, f"{said}\n{logs}"
    return said


@pytest.mark.slow
def test_grpo_over_two_nodes_by_ray(
    network: Network, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_script("pbs", grpo(tmp_path, tiny_model, steps=2), network, tmp_path, capsys)
    for node in network.nodes:
        assert f"eth0 {node.address}" in said
    assert [int(row["step"]) for row in read_metrics(tmp_path / "runs/grpo/metrics.jsonl")] == [1, 2]
    joined = sorted(tmp_path.glob("runs/grpo/jobs/*/logs/ray-*.txt"))
    assert [path.name for path in joined] == ["ray-0-n1.txt", "ray-1-n2.txt"]


@pytest.mark.slow
def test_an_sglang_on_another_node_is_given_the_policys_weights_and_answers_with_them(
    network: Network, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script("pbs", grpo(tmp_path, tiny_model, steps=3, engine="sglang"), network, tmp_path, capsys)
    rows = read_metrics(tmp_path / "runs/grpo/metrics.jsonl")
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    # a node has room for one of the two; what the engine computes with are the trainer's weights of each step
    assert all(row["mismatch/log_prob_max"] < 1e-4 for row in rows), rows


@pytest.mark.slow
def test_sft_over_two_nodes_by_torchrun(
    network: Network, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script("lsf", sft(tmp_path, tiny_model, steps=2), network, tmp_path, capsys)
    assert [int(row["step"]) for row in read_metrics(tmp_path / "runs/sft/metrics.jsonl")] == [1, 2]
