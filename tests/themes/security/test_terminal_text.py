"""Nothing that a run, a model or a row wrote steers a terminal: each command is shown poisoned files, on a real terminal."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli.commands import COMMANDS
from megarl.config.load import to_yaml
from tests.config import smallest
from tests.observe.recorded import write_run

ROOT = Path(__file__).parents[3]
TINY = ROOT / "models" / "tiny-arithmetic"
HARM = "\x1b]0;taken over\x07\x1b[2J\x1b]8;;http://x\x1b\\\x9b2J\x9d0;x\x9c\x85\rlast\u202eneddih\u2066\u200f\u2028\U000e0041"
TAIL = HARM.replace("\n", "")
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*[AK]|\r\n|\r(?=\x1b\[2K)")
"""What rich makes: colours, the cursor hidden and shown, lines drawn again. A terminal has \\r\\n for every line break."""


def steering(output: bytes) -> list[str]:
    """Control characters in what a terminal was sent, but for those of `OWN`."""
    text = OWN.sub("", output.decode())
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return [letter for letter in text if unicodedata.category(letter) in kinds and letter not in "\n\t"]


def poisoned(value: Any) -> Any:
    """The value with harm in all texts, and in names of fields that are free."""
    if isinstance(value, str):
        return value + HARM
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    if isinstance(value, dict):
        fixed = ("kind", "type", "state")
        return {name: item if name in fixed else poisoned(item) for name, item in value.items()}
    return value


def poisoned_run(folder: Path) -> Path:
    """A run of which every text that it wrote is poisoned, with its own name, names of metrics, rewards and spans."""
    run = write_run(folder / f"r{HARM[:7]}\x9b2J\u202e", steps=2)
    for name in ("samples", "faults"):
        rows = [poisoned(json.loads(line)) for line in (run / f"{name}.jsonl").read_text().splitlines()]
        rows = [row | ({"rewards": {f"exact{HARM}": 1.0}, "turns": TURNS} if name == "samples" else {}) for row in rows]
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [{"step": step, f"reward/{HARM}": step, "reward/mean": 0.5, f"zero{HARM}": 0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + f'{{"{TAIL}": 1}}\n[\n')
    (run / "summary.json").write_text(json.dumps({"gates": {HARM: "x"}}))
    (run / "config.yaml").write_text(json.dumps({"run": {"name": HARM}, HARM: {HARM: HARM}, "model": {"path": HARM}}))
    return run


TURNS = [{"role": f"user{HARM}", "content": HARM}, {"role": "assistant", "content": [{"type": "text", "text": HARM}]}]


def on_a_terminal(arguments: list[str], folder: Path) -> tuple[bytes, int]:
    """What `megarl ARGUMENTS` sends to the terminal that it runs in, and its exit code."""
    ours, theirs = os.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PYTHONUTF8": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "megarl", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=folder, env=environment)
    os.close(theirs)
    output = b""
    while True:
        ready, _, _ = select.select([ours], [], [], 0.1)
        try:
            if ready and not (block := os.read(ours, 1 << 16)):
                break
            output += block if ready else b""
        except OSError:  # the terminal's other end is closed
            break
    os.close(ours)
    return output, process.wait(timeout=60)


def commands(run: Path, folder: Path) -> dict[str, list[str]]:
    """For each command arguments with which it says what somebody else wrote."""
    config = folder / "config.yaml"
    tree = yaml.safe_load(to_yaml(smallest.config(run={"name": "a", "folder": str(folder / "runs")}))) | {HARM: 1}
    config.write_text(json.dumps(tree))
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": HARM, HARM: HARM}) + "\n")
    model = str(TINY)
    of_config = {name: [name, str(config)] for name in TAKING_A_CONFIG}
    return {
        **of_config,
        "report": ["report", str(run), "--out", str(folder / "page.html")],
        "compare": ["compare", str(run), str(write_run(folder / "other", lr=3.0))],
        "samples": ["samples", str(run), "--count", "3"],
        "samples by role": ["samples", str(run), "--role", "nobody"],
        "data": ["data", "inspect", str(rows), "--model", model],
        "generate": ["generate", str(config), "--out", str(folder / "out")],
        "rewards": ["rewards", str(config)],
        "convert": ["convert", "inspect", str(run)],
        "node": ["node", HARM],
        "chat": ["chat", str(run)],
        "doctor": ["doctor", "--ports", str(run)],
        "none": [f"train{TAIL}"],
    }


TAKING_A_CONFIG = (
    *("train", "sft", "reward-model", "preference", "eval", "generate", "serve", "serve-reward", "episodes", "plan"),
    *("rehearse", "config", "submit"),
)
NAMES = [*COMMANDS, "samples by role", "none"]


@pytest.mark.parametrize("name", NAMES)
def test_a_command_sends_no_control_characters_of_others_to_the_terminal(name: str, tmp_path: Path) -> None:
    if name in ("data",) and not (TINY / "config.json").exists():
        pytest.skip("needs models/tiny-arithmetic (make tiny-model)")
    run = poisoned_run(tmp_path)
    output, code = on_a_terminal(commands(run, tmp_path)[name], tmp_path)
    assert steering(output) == [], output[-2000:]
    assert code in (0, 1, 2)
    assert b"Traceback" not in output
    if name in ("report", "compare", "samples", "samples by role", "train", "config", "none"):
        assert b"\\u202e" in output, "it says what was written"
