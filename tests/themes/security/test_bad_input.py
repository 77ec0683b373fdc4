"""The first cases of benchmarks/bad_input.py, of all kinds: exit code 2, one sentence, nothing written, nobody left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = 40


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "models" / "tiny-arithmetic").is_dir(), reason="needs models/tiny-arithmetic (make tiny-model)")
@pytest.mark.timeout(240)
def test_bad_input_is_one_sentence_and_nothing_else(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/bad_input.py",
        "--cases",
        str(CASES),
        "--seed",
        "7",
        "--json",
        str(tmp_path / "result.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["cases"], result["as_they_must"]) == (CASES, CASES)
    assert set(result["by_kind"]) == {"config", "data", "model", "http", "cli"}
    assert all(said.startswith("megarl: ") for said in result["said"].values())
