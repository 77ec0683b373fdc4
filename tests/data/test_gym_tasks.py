"""Tasks of reasoning_gym are imported in silence, also where nothing that is imported is compiled yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = {
    "command": "import sys; from megarl.cli.commands import main; main(['--version']); import reasoning_gym",
    "judges": "from megarl.rewards.sandbox.judges import reasoning_gym_judge; reasoning_gym_judge()",
    "user": "exec(compile('1 is 1', 'user.py', 'exec'))",
}


@pytest.mark.parametrize("name", CODE)
def test_warnings_of_what_it_imports_are_not_shown(name: str, tmp_path: Path) -> None:
    """Those of a user's own code are."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE[name]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("SyntaxWarning" in done.stderr) == (name == "user"), done.stderr
    assert name == "user" or done.stderr == ""
