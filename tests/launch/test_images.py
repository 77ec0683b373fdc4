"""The images are made by the book: hadolint has nothing to say, nobody is root in them, and both ways to build agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([str(TOOLS / "hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""
    script = ROOT / "requirements" / "install-gpu.sh"
    assert subprocess.run([str(TOOLS / "shellcheck"), str(script)], check=False).returncode == 0


def test_each_target_ends_as_another_user_than_root() -> None:
    targets = (ROOT / "Dockerfile").read_text().split("\nFROM ")[1:]
    users = [re.findall(r"^USER (\d+)$", target, re.M)[-1] for target in targets]
    assert len(users) == 2
    assert all(int(user) >= 1000 for user in users)


def test_the_apptainer_image_is_the_gpu_image() -> None:
    docker, apptainer = (ROOT / "Dockerfile").read_text(), (ROOT / "apptainer.def").read_text()
    base = re.findall(r"^From: (.+)$", apptainer, re.M)
    assert f"FROM {base[0]} AS gpu" in docker
    assert "bash requirements/install-gpu.sh" in docker
    assert "bash requirements/install-gpu.sh" in apptainer
    assert [path for path in re.findall(r"^    (\S+) /app/", apptainer, re.M) if not (ROOT / path).exists()] == []
