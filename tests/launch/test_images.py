"""The images are made by the book: hadolint has nothing to say, nobody is root in them, and both ways to build agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

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


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\s*\"?([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([0-9][^\s;\",]*)", text.lower().replace("_", "-"), re.M))


def test_the_gpu_image_has_the_versions_that_the_package_pins() -> None:
    of_both = ((ROOT / "requirements" / name).read_text() for name in ("constraints.txt", "constraints-gpu.txt"))
    common, of_gpus = map(pins, of_both)
    assert not common.keys() & of_gpus.keys()
    constraints = common | of_gpus
    setup = (ROOT / "setup.py").read_text().split("TEST = [")[0].replace("megatron-core==0.16.1; python_version < '3.12'", "")
    wanted = {name: version for name, version in pins(setup).items() if name != "setuptools"}
    assert {"megatron-core", "transformers", "sglang"} <= wanted.keys()
    assert {name: constraints.get(name) for name in wanted} == wanted
    script = (ROOT / "requirements" / "install-gpu.sh").read_text()
    version = re.findall(r"^transformer_engine=(\S+)$", script, re.M)[0]
    assert constraints["transformer-engine"] == constraints["transformer-engine-cu13"] == version
    assert f"transformer-engine=={version}" in (ROOT / "requirements" / "transformer-engine.txt").read_text().replace("_", "-")


def test_no_step_of_the_gpu_image_asks_for_what_its_constraints_forbid() -> None:
    script = (ROOT / "requirements" / "install-gpu.sh").read_text()
    left_out = re.findall(r"^grep .*'\^(\S+)=='", script, re.M)
    files = (ROOT / "requirements" / name for name in ("constraints.txt", "constraints-gpu.txt"))
    constraints = {name: version for file in files for name, version in pins(file.read_text()).items() if name not in left_out}
    asked = [Requirement(text) for text in re.findall(r'"([a-z0-9-]+[<>=!~][^"$]*)"', script)]
    assert [one.name for one in asked] == ["setuptools"]
    assert [str(one) for one in asked if one.name in constraints and not one.specifier.contains(constraints[one.name])] == []


def test_what_the_gpu_target_installs_from_is_copied_before() -> None:
    target = (ROOT / "Dockerfile").read_text().split(" AS gpu")[1]
    before = target.split("bash requirements/install-gpu.sh")[0]
    of_requirements = ("install-gpu.sh", "constraints.txt", "constraints-gpu.txt")
    for file in ("setup.py", *(f"requirements/{name}" for name in of_requirements), "megarl/__init__.py"):
        assert file in before
