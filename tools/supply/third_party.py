"""Reads THIRD_PARTY.md, and finds what in the repository looks like somebody else's work."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OWN_DATA = {
    "benchmarks/results/*.json": "measured by benchmarks/",
    "benchmarks/*.yaml": "configs of measurements",
    "benchmarks/gpu_parts.txt": "questions to a GPU",
    "examples/*.yaml": "configs",
    "examples/*.yml": "configs, dashboards and manifests",
    "tests/*.yaml": "configs and plans of tests",
    "docs/images/*.png": "drawn from megarl's own runs and report",
    "docs/images/resharding.svg": "drawn here",
    "requirements/*.txt": "names and versions of packages",
    "mkdocs.yml": "settings",
}
"""Pattern → why these files of data are megarl's own. `*` stands for slashes too."""

CODE = {".py", ".pyi", ".sh", ".md", ".j2", ".js", ".css", ".html", ".toml", ".def"}
"""What is written here, unless something in it says otherwise."""
PLAIN = {".ci/run", ".dockerignore", ".gitignore", "Dockerfile", "LICENSE", "Makefile", "megarl/py.typed"}
FOLDERS = {"vendor", "vendored", "third_party", "thirdparty", "external", "contrib", "published", "schemas"}
"""Names of folders for the work of others."""
NOTICE = re.compile(
    r"copyright\b.{0,20}\d{4}|\(c\) \d{4}|©|SPDX-License-Identifier|/\*!|@license|@preserve|licensed under the"
    r"|templates [^.\n]*as they are published|(copied|adapted|ported|vendored) from https?:",
    re.I,
)
"""What somebody else's file says, or should say of itself here."""
MINIFIED = 1000
"""Characters in a line that nobody writes by hand."""


@dataclass(frozen=True)
class Row:
    """A row of THIRD_PARTY.md."""

    path: str
    what: str
    source: str
    licence: str
    shipped: bool


def rows(page: Path = ROOT / "THIRD_PARTY.md") -> list[Row]:
    """Return the table of the page."""
    lines = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| `")]
    return [Row(path.strip("`"), what, source, licence, shipped == "yes") for path, what, source, licence, shipped in lines]


def tracked(root: Path = ROOT) -> list[str]:
    """Return the files that git knows, relative to `root`."""
    listing = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return [name for name in listing.split("\0") if name and (root / name).is_file()]


def foreign(name: str, root: Path = ROOT) -> str | None:
    """Return why a file looks like somebody else's, or is data of which nothing is known; None: it does not."""
    path = root / name
    if FOLDERS & set(Path(name).parts[:-1]) and path.suffix not in (".md", ".py"):
        return "it lies in a folder for the work of others"
    if name in PLAIN or any(fnmatch(name, pattern) for pattern in OWN_DATA):
        return None
    if path.suffix not in CODE:
        return "it is data of which OWN_DATA in tools/supply/third_party.py says nothing"
    text = path.read_text(errors="replace")
    if notice := NOTICE.search(text):
        return f"it says {notice[0].strip()!r}"
    if path.suffix in (".js", ".css", ".html") and any(len(line) > MINIFIED for line in text.splitlines()):
        return f"a line has more than {MINIFIED} characters, as in minified files"
    return None
