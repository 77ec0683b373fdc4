"""Benchmarks that nothing else runs still run: each once at its smallest size. What they measure is not looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_driver_of_a_simulated_step_is_measured_in_all_its_parts() -> None:
    from benchmarks.scaling import step_seconds

    seconds = step_seconds(16)
    parts = {"batch", "planning", "packing", "serialising", "dispatch", "collection", "advantages"}
    assert parts <= seconds.keys()
    assert all(seconds[part] > 0 for part in parts)


@pytest.mark.slow
def test_the_kernels_of_a_step_are_listed(tmp_path: Path) -> None:
    listed = tmp_path / "kernels.txt"
    command = [sys.executable, "benchmarks/profile_step.py", str(listed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "aten::" in listed.read_text()
    assert "kernels" in listed.read_text().splitlines()[-1]
