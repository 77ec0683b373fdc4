"""Reads the locks of requirements/ (written by requirements/lock.py): which packages, at which versions, from which files."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s;]+)")
VIA = re.compile(r"#\s+(?:via )?(?!via$)(?:(?P<file>-r \S+|megarl \(setup\.py\))|(?P<name>[\w.-]+))")
"""A comment of uv's under a package: who asks for it, a package or a file; constraints (`-c FILE`) ask for nothing."""
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})(?![0-9a-f])")


@dataclass(frozen=True)
class Locked:
    """A package of a lock: its version, the SHA-256 of each file that the index has of it, and which packages ask for it.

    `megarl` stands for setup.py and the files beside the lock.
    """

    version: str
    hashes: tuple[str, ...]
    asked_by: tuple[str, ...] = ()


def lock_of(python: tuple[int, int] = sys.version_info[:2]) -> Path:
    """Return the lock of a Python, by default of the one that runs."""
    return REQUIREMENTS / f"lock-py{python[0]}{python[1]}.txt"


def locks() -> list[Path]:
    """Return all locks, sorted."""
    return sorted(REQUIREMENTS.glob("lock-py*.txt"))


def read_lock(path: Path) -> dict[str, Locked]:
    """Return canonical name -> package.

    Raises:
        ValueError: a line is neither a pin, a hash nor a comment, or names a package again.
    """
    found: dict[str, tuple[str, list[str], list[str]]] = {}
    name = ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.removesuffix("\\").strip()
        if pin := PIN.fullmatch(text):
            name = canonicalize_name(pin["name"])
            if name in found:
                raise ValueError(f"{path}:{number} names {name} again")
            found[name] = (pin["version"], [], [])
        elif (digest := HASH.fullmatch(text)) and name:
            found[name][1].append(digest[1])
        elif (asks := VIA.fullmatch(text)) and name:
            found[name][2].append("megarl" if asks["file"] else canonicalize_name(asks["name"]))
        elif text and not text.startswith("#"):
            raise ValueError(f"{path}:{number} is {text!r}, which is neither a pin, a hash nor a comment")
    return {name: Locked(version, tuple(hashes), tuple(dict.fromkeys(asks))) for name, (version, hashes, asks) in found.items()}


def setup_lists() -> dict[str, list[str]]:
    """Return the lists of requirements in setup.py, by their names there (REQUIRES, TEST, …)."""
    scope: dict[str, object] = {}
    for node in ast.parse((REQUIREMENTS.parent / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            exec(compile(ast.Module([node], []), "setup.py", "exec"), scope)
    return {name: value for name, value in scope.items() if isinstance(value, list)}


def read_pins(path: Path) -> dict[str, str]:
    """Return canonical name -> version from the lines `name==version` of a requirements file; other lines are left out."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonicalize_name(pin["name"]): pin["version"] for line in lines if (pin := PIN.fullmatch(line))}
