"""A reward that, the first time that it is asked, kills an engine's process on its second node."""

from __future__ import annotations

from pathlib import Path

_SOURCE = """
import pathlib
import psutil

KILLED = pathlib.Path(__file__).with_suffix(".killed")


def reward(samples):
    if not KILLED.exists():
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if {model!r} in line and "megarl.rollout.engines.sglang.launch" in line and "--node-rank 1" in line:
                KILLED.write_text(str(process.pid))
                process.kill()
    return [float(len(sample.response_ids) % 3) for sample in samples]
"""


def write_killer(folder: Path, model: Path) -> tuple[str, Path]:
    """The reward's name for a config, and the file in which it says whom it killed; `model` is what that engine serves."""
    file = folder / "killer.py"
    file.write_text(_SOURCE.format(model=str(model)))
    return f"{file}:reward", file.with_suffix(".killed")
