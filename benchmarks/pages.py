"""Tables of benchmarks on pages of docs/."""

from __future__ import annotations

from pathlib import Path


def put_into(page: Path, name: str, text: str) -> None:
    """Write `text` between the page's marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
