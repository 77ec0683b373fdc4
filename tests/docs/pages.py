"""The pages of docs/ as the site shows them: headings with the ids that Python-Markdown gives them, links, code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)[^\S\n]*([^\n]*)\n(.*?)^```[^\S\n]*$", re.DOTALL | re.MULTILINE)
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the `title="…"` that follows it, and what stands in it."""

    language: str
    title: str
    text: str


def pages() -> list[Path]:
    """All pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of `page`, in order."""
    found = []
    for language, attributes, text in FENCE.findall(page.read_text()):
        title = re.search(r'title="([^"]+)"', attributes)
        found.append(Block(language, title[1] if title else "", text))
    return found


def pattern(line: str, numbers: bool) -> str:
    """The regular expression of a line that a page shows; with `numbers` each number stands for any number."""
    words = re.split(rf"({NUMBER}|…|\s+)", line.strip())
    return "".join(
        ".*"
        if word == "…"
        else r"\s+"
        if word.isspace()
        else NUMBER
        if numbers and re.fullmatch(NUMBER, word)
        else re.escape(word)
        for word in words
        if word
    )


def missing(shown: str, printed: str, numbers: bool) -> list[str]:
    """The lines of `shown` that `printed` does not have (see `pattern`)."""
    return [line for line in shown.splitlines() if line.strip() and not re.search(pattern(line, numbers), printed)]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The ids in `page` as Python-Markdown renders it with the site's extensions."""
    import markdown

    reader = _Ids()
    reader.feed(markdown.markdown(page.read_text(), extensions=["toc", "attr_list", "tables", "pymdownx.superfences"]))
    return frozenset(reader.ids)


def links(page: Path) -> list[str]:
    """Where the links of `page` lead, code left out."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    return re.findall(r"\]\(([^)\s]+)\)", prose)


class _Ids(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value for name, value in attrs if name == "id" and value}
