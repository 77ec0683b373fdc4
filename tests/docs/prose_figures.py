"""Figures in sentences that people write: numbers with a unit of time, bytes, rates, nats or per cent.

Left out are code and what is made of benchmarks/results/: tables between marks, and the phrases of tools/docs/phrases.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import DOCS, FENCE

WRITTEN_BY_PROGRAM = ("config.md", "cli.md", "errors.md")
HISTORY = ("history.md",)
"""Tells what was so at a version."""
UNITS = (
    "s", "ms", "µs", "ns", "seconds?", "minutes?", "hours?", "kB", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "nats",
    "times", "tokens/s", "samples/s", "TFLOP/s", "TB/s", "GB/s", "a second",
)  # fmt: skip
_NUMBER = r"(?<![\w.,/·\-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
_FIGURE = re.compile(rf"{_NUMBER}(?:\s(?:to|and|or)\s\d[\d,]*(?:\.\d+)?)?\s(?:%|(?:{'|'.join(UNITS)})(?![\w/]))")
_TABLE = re.compile(r"<!-- ([\w :-]+): begin -->.*?<!-- \1: end -->", re.DOTALL)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b|\b(?:October|November|December|January|February|March) 20\d\d\b")


def pages() -> list[str]:
    """The pages whose sentences people write, README among them, by their path from docs/."""
    names = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    return ["../README.md", *(name for name in names if name not in (*WRITTEN_BY_PROGRAM, *HISTORY))]


def prose(text: str, phrases: list[str]) -> list[str]:
    """The sections of a page, each in one line, without tables and phrases that are made, and without code."""
    text = FENCE.sub("", _TABLE.sub("", text))
    sections = []
    for section in re.split(r"^#{2,} ", text, flags=re.MULTILINE):
        words = " ".join(section.split())
        for phrase in phrases:
            words = words.replace(phrase, "…")
        sections.append(re.sub(r"`[^`]*`", "…", words))
    return sections


def figures(section: str) -> list[str]:
    """The figures in a section, `2.4 ms`, as they stand."""
    return [match[0] for match in _FIGURE.finditer(section)]


def text_of(page: str) -> str:
    """A page as it stands."""
    return Path(DOCS, page).read_text()
