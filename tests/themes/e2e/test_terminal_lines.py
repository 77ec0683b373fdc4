"""What `megarl train` prints: lines of at most 80 columns, one for each step, and nothing that other libraries say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DRIVER = """
import sys
from megarl.cli.commands import main

code = main()
assert "megatron" not in sys.modules, "an answer of a rank made the driver import megatron-core"
sys.exit(code)
"""


def test_a_run_in_a_pipe_says_a_line_a_step_and_nothing_wider_than_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    """Only the line of a step is wider there: it has the time left and the phases, which a terminal shows below."""
    config = ROOT / "examples" / "tiny" / "ppo.yaml"
    overrides = ["run.folder=runs", "run.steps=2", f"model.path={tiny_model}", "rollout.prompts_per_step=8", "run.name=r"]
    overrides += ["rollout.samples_per_prompt=2", "data.max_prompt_tokens=64"]
    # torch warns of a toolkit without a GPU
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "-c", DRIVER, "train", str(config), *overrides]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode() == ""
    text = done.stdout.decode()
    assert all(line.isprintable() for line in text.split("\n"))
    lines = text.splitlines()
    steps = [line for line in lines if re.match(r"step \d", line)]
    assert [line.split("  ")[0] for line in steps] == ["step 1/2", "step 2/2"]
    assert [line for line in lines if len(line) > 80 and line not in steps] == []
    for beginning in (
        "layer spec ",
        "optimizer torch",
        "started: Ray ",
        "micro-batches per DP rank ",
        "done: runs/r",
        "to see it: ",
    ):
        assert [line.startswith(beginning) for line in lines].count(True) == 1, beginning
