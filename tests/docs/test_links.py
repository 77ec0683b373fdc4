"""Every reference to a page leads somewhere: from the code, from page to page, and from the site's navigation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT, anchors, links, pages

pytest.importorskip("material", reason="needs mkdocs-material (pip install 'megarl[docs]')")

MENTION = re.compile(r"docs/((?:evidence/)?[\w-]+\.md)(?:#([\w-]+))?")
TEXTS = ("*.py", "*.md", "*.yaml", "*.yml", "*.sh", "Makefile")


def sources() -> list[Path]:
    """Files in which a person may meet the name of a page."""
    folders = [ROOT / name for name in ("megarl", "docs", "tests", "tools", "examples", "benchmarks")]
    found = [path for folder in folders for pattern in TEXTS for path in folder.rglob(pattern)]
    return sorted([*found, *ROOT.glob("*.md"), ROOT / "Makefile"])


def wrong_mentions(text: str) -> Iterator[str]:
    """The mentions `docs/<page>.md#<anchor>` in `text` that lead nowhere."""
    for page, anchor in MENTION.findall(text):
        if not (DOCS / page).is_file():
            yield f"docs/{page}: there is no such page"
        elif anchor and anchor not in anchors(DOCS / page):
            yield f"docs/{page}#{anchor}: the page has no such heading"


def test_a_mention_that_leads_nowhere_is_found() -> None:
    text = "docs/methods" + ".md#loss-clip, docs/methods" + ".md#loss-clipp, docs/method" + ".md, docs/methods" + ".md"
    assert list(wrong_mentions(text)) == [
        "docs/methods" + ".md#loss-clipp: the page has no such heading",
        "docs/method" + ".md: there is no such page",
    ]


def test_every_page_that_is_mentioned_is_there_and_has_the_heading() -> None:
    wrong = [f"{path.relative_to(ROOT)}: {problem}" for path in sources() for problem in wrong_mentions(path.read_text())]
    assert wrong == []


def test_nothing_cites_a_document_that_readers_do_not_have() -> None:
    cited = re.compile(r"\bMETHODS\b")
    found = [str(path.relative_to(ROOT)) for path in sources() if cited.search(path.read_text()) and path != Path(__file__)]
    assert [name for name in found if name != "docs/history.md"] == []


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    wrong = []
    for page in [*pages(), *ROOT.glob("*.md")]:
        for link in links(page):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                wrong.append(f"{page.name}: {link}: there is no such file")
            elif anchor and anchor not in anchors(target):
                wrong.append(f"{page.name}: {link}: there is no such heading")
    assert wrong == []


def in_navigation(entry: object) -> Iterator[str]:
    """The pages that `entry` of `nav` names."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for inner in entry.values():
            yield from in_navigation(inner)
    elif isinstance(entry, list):
        for inner in entry:
            yield from in_navigation(inner)


def test_every_page_stands_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(in_navigation(site["nav"])) == sorted(page.relative_to(DOCS).as_posix() for page in pages())


def test_every_page_begins_with_who_needs_it() -> None:
    for page in pages():
        lines = [line for line in page.read_text().splitlines() if line and not line.startswith("<!--")]
        assert lines[0].startswith("# "), page.name
        assert lines[1].startswith("For "), f"{page.name} must begin with a sentence that says who needs it: For people who …"


def test_every_file_that_a_page_names_is_there() -> None:
    named = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|sh|cfg|toml)|(?:examples|benchmarks)/[\w./-]+\.(?:yaml|json))(?:::\w+)?`")
    roots = [ROOT, ROOT / "megarl"]
    missing = {
        f"{page.name}: {name}"
        for page in [*pages(), *ROOT.glob("*.md")]
        if page.name != "history.md"  # names files as they were
        for name in named.findall(page.read_text())
        if not any((root / name).is_file() for root in roots)
    }
    assert sorted(missing) == []
