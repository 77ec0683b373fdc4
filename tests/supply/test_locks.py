"""The locks agree with setup.py, with the versions of constraints.txt and with what `make venv` installed."""

from __future__ import annotations

import ast
import re
import sysconfig
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.supply.scripts import ROOT, script

lock_file = script("lock_file")
REQUIREMENTS = ROOT / "requirements"
PYTHONS = [(3, 11), (3, 12)]
NOT_LOCKED = {
    "torch": "which build is right depends on the machine, and each has other files (Makefile: TORCH)",
    "pip": "comes with the interpreter, and installs what is locked; wheel does so with some",
    "torchvision": "the same; it lies beside the environment",
}
"""May be installed, and is in no lock."""
OF_OTHER_BUILDS = re.compile(r"nvidia-.*|triton|cuda-.*")
"""What torch's builds for CUDA bring along: as much the machine's business as torch."""


def test_every_python_that_is_tested_has_its_lock() -> None:
    assert lock_file.locks() == [lock_file.lock_of(python) for python in PYTHONS]
    written = ast.literal_eval(re.search(r"^LOCKS = (.*)$", (REQUIREMENTS / "lock.py").read_text(), re.M)[1])
    assert sorted(written) == [path.name for path in lock_file.locks()]


@pytest.mark.parametrize("path", lock_file.locks(), ids=lambda path: path.stem)
def test_a_lock_has_the_versions_of_constraints_and_of_the_files_that_pin(path: Path) -> None:
    locked = lock_file.read_lock(path)
    assert len(locked) > 200
    pinned = {
        name: version
        for file in ("constraints.txt", "sglang-cpu.txt", "rdma-cpu.txt", "model.txt")
        for name, version in lock_file.read_pins(REQUIREMENTS / file).items()
        if name != "torchvision"  # lies beside the environment, and belongs to a build of torch
    }
    exact = {"megatron-core"}  # setup.py names one for each Python
    assert {name: package.version for name, package in locked.items() if name not in exact} == pinned


@pytest.mark.parametrize("python", PYTHONS, ids=str)
def test_what_setup_asks_for_is_in_the_lock(python: tuple[int, int]) -> None:
    locked = lock_file.read_lock(lock_file.lock_of(python))
    lists = lock_file.setup_lists()
    assert {"REQUIRES", "SGLANG", "TEST", "DOCS"} <= set(lists)
    environment = {
        "python_version": f"{python[0]}.{python[1]}",
        "python_full_version": f"{python[0]}.{python[1]}.9",
        "extra": "",
    }
    for name, requirements in lists.items():
        if name in ("GPU", "SWANLAB"):  # other kernels than a CPU's, and a protobuf below that of constraints.txt
            continue
        for requirement in map(Requirement, requirements):
            if requirement.name == "torch" or (requirement.marker and not requirement.marker.evaluate(environment)):
                continue
            package = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(package.version), f"{requirement} of {name}, locked {package.version}"


def needed() -> set[str]:
    """The installed packages that setup.py asks for, and what these ask for in turn: not what somebody added by hand."""
    files = [lock_file.read_pins(REQUIREMENTS / file) for file in ("sglang-cpu.txt", "rdma-cpu.txt", "model.txt")]
    alone = {name for pins in files for name in pins}  # installed with --no-deps
    asked = [Requirement(text) for requirements in lock_file.setup_lists().values() for text in requirements]
    found = set(alone)
    while asked:
        requirement = asked.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} if name not in found else requirement.extras:
            try:
                lines = [] if name in alone else requires(name) or []
            except PackageNotFoundError:
                continue
            found.add(name)
            inner = map(Requirement, lines)
            asked += [one for one in inner if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def test_every_installed_package_is_in_the_lock_at_its_version() -> None:
    locked = lock_file.read_lock(lock_file.lock_of())
    here = [sysconfig.get_path("purelib")]  # alone: ray, once imported, has folders with others' packages on the path
    installed = {canonicalize_name(found.metadata["Name"]): found.version for found in distributions(path=here)}
    names = {name for name in needed() & set(installed) - NOT_LOCKED.keys() if not OF_OTHER_BUILDS.fullmatch(name)}
    assert len(names) > 100
    assert names - set(locked) == set()
    # somebody's own packages may be there, but none at another version than the locked one
    assert {name: installed[name] for name in set(installed) & set(locked)} == {
        name: locked[name].version for name in set(installed) & set(locked)
    }


@pytest.mark.parametrize("path", lock_file.locks(), ids=lambda path: path.stem)
def test_every_package_has_the_hashes_of_its_files_for_others_too(path: Path) -> None:
    locked = lock_file.read_lock(path)
    assert [name for name, package in locked.items() if not package.hashes] == []
    # wheels of the index for macOS and other Pythons: a lock written from a folder of this machine's wheels has one hash
    assert min(len(locked[name].hashes) for name in ("numpy", "cffi", "pyyaml", "scipy")) > 20
    assert not {name for name in locked if OF_OTHER_BUILDS.fullmatch(name)} | ({"torch", "torchvision"} & set(locked))


def test_a_damaged_lock_is_told(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    digest = "0" * 64
    lock.write_text(f"# head\na-b==1.0 \\\n    --hash=sha256:{digest}\n    # via\n    #   c\n")
    assert lock_file.read_lock(lock) == {"a-b": lock_file.Locked("1.0", (digest,), ("c",))}
    for wrong in ("a>=1", "a==1.0\na==1.1", f"--hash=sha256:{digest}", f"a==1.0 \\\n    --hash=sha256:{digest}0"):
        lock.write_text(wrong + "\n")
        with pytest.raises(ValueError, match=str(lock)):
            lock_file.read_lock(lock)
