"""Known advisories are found in the locks without a network, and a database tells how old it is."""

from __future__ import annotations

import json
import re
import zipfile
from datetime import date
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.supply.scripts import ROOT, script

advisories = script("advisories")

RECORD = {
    "id": "PYSEC-1-1",
    "aliases": ["CVE-1-1"],
    "affected": [
        {
            "package": {"name": "Some_Package", "ecosystem": "PyPI"},
            "ranges": [
                {"type": "GIT", "events": [{"introduced": "0"}]},
                # as urllib3's PYSEC-2023-192: the newer branch comes first
                {
                    "type": "ECOSYSTEM",
                    "events": [{"introduced": "2.0"}, {"fixed": "2.6"}, {"introduced": "0"}, {"fixed": "1.17"}],
                },
                {"type": "ECOSYSTEM", "events": [{"introduced": "3.0"}, {"last_affected": "3.1-NA"}]},
            ],
            "versions": ["1.1", "2.5", "9.9", "not a version"],
        },
        {"package": {"name": "other", "ecosystem": "npm"}, "versions": ["1.0"]},
    ],
}


@pytest.fixture(scope="module")
def database() -> object:
    return advisories.read_database()


def test_the_locks_have_no_advisory_that_is_not_accepted(database: object) -> None:
    said, good = advisories.check(database, advisories.looked_up(), date.today())
    assert good, "\n".join(said)


def test_what_is_looked_up_is_every_lock_and_what_is_pinned_without_one() -> None:
    files = dict(advisories.looked_up())
    assert {"lock-py311.txt", "lock-py312.txt", "constraints-gpu.txt", "cookbook.txt", "installed here"} <= set(files)
    assert all(files.values())
    assert {"torch"} == set(files["installed here"])
    pinning = {path.name for path in (ROOT / "requirements").glob("*.txt") if re.search(r"^[\w.-]+==", path.read_text(), re.M)}
    locked = {"constraints.txt", "model.txt", "rdma-cpu.txt"}  # tests/supply/test_locks.py holds them to the locks
    assert pinning - locked == set(files) - {"installed here"}


@pytest.mark.parametrize(
    ("package", "version", "identifier"),
    [
        ("requests", "2.19.0", "CVE-2018-18074"),
        ("jinja2", "2.11.2", "CVE-2020-28493"),
        ("aiohttp", "3.7.3", "CVE-2021-21330"),
        ("urllib3", "1.26.16", "CVE-2023-43804"),
        ("urllib3", "2.0.5", "CVE-2023-43804"),
        ("torch", "2.5.1+cpu", "CVE-2025-32434"),
        ("ray", "2.53.0", "CVE-2026-27482"),
    ],
)
def test_versions_known_to_be_affected_are_found_and_the_fixed_ones_are_not(
    database: object, package: str, version: str, identifier: str
) -> None:
    fixed = {
        "CVE-2018-18074": "2.20.0",
        "CVE-2020-28493": "2.11.3",
        "CVE-2021-21330": "3.7.4",
        "CVE-2023-43804": "1.26.17" if version.startswith("1") else "2.0.6",
        "CVE-2025-32434": "2.6.0+cu124",
        "CVE-2026-27482": "2.54.0",
    }
    names = {alias for *_, advisory in advisories.affecting(database, {package: version}) for alias in advisory.aliases}
    assert identifier in names
    names = {alias for *_, found in advisories.affecting(database, {package: fixed[identifier]}) for alias in found.aliases}
    assert identifier not in names


def refreshed(tmp_path: Path, record: dict) -> object:
    """The database of one record, by way of a zip file as OSV's, and of a clone, which must not differ."""
    source, clone = tmp_path / "all.zip", tmp_path / "clone"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("PYSEC-1-1.json", json.dumps(record))
    (clone / "vulns/some-package").mkdir(parents=True, exist_ok=True)
    (clone / "vulns/some-package/PYSEC-1-1.yaml").write_text(yaml.safe_dump(record))
    assert advisories.refresh(source, "a test", "2026-07-23", tmp_path / "zip.jsonl") == (0 if "withdrawn" in record else 1)
    advisories.refresh(clone, "a test", "2026-07-23", tmp_path / "clone.jsonl")
    assert (tmp_path / "zip.jsonl").read_bytes() == (tmp_path / "clone.jsonl").read_bytes()
    return advisories.read_database(tmp_path / "zip.jsonl")


def test_a_record_is_cut_to_what_decides(tmp_path: Path) -> None:
    found = refreshed(tmp_path, RECORD)
    assert (found.origin, found.date, found.age_days(date(2026, 8, 2))) == ("a test", "2026-07-23", 10)
    (advisory,) = found.advisories.pop("some-package")
    assert not found.advisories
    affected = ["0.1", "1.1", "1.16.9", "1.17rc1", "2.0", "2.5", "2.6.dev1", "3.0", "3.1", "9.9"]
    assert [text for text in affected if not advisory.affects(text)] == []
    assert [text for text in ["1.17", "1.99", "2.0rc1", "2.6", "2.9", "3.1.1", "4.0", "9.8"] if advisory.affects(text)] == []
    assert advisory.versions == ("9.9",)
    assert not refreshed(tmp_path, RECORD | {"withdrawn": "2026-01-01T00:00:00Z"}).advisories


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=2, max_size=6, unique=True), st.tuples(*[st.integers(0, 3)] * 2))
def test_ranges_hold_what_packaging_s_specifiers_do(bounds: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    texts = [f"{major}.{minor}" for major, minor in sorted(bounds)][: len(bounds) // 2 * 2]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    events = [event for start, end in reversed(pairs) for event in ({"introduced": start}, {"fixed": end})]
    version = f"{asked[0]}.{asked[1]}"
    expected = any(SpecifierSet(f">={start},<{end}").contains(version) for start, end in pairs)
    assert advisories.in_range(advisories.sorted_events(events), Version(version)) == expected


def test_what_is_not_accepted_fails_and_so_does_what_need_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = refreshed(tmp_path, RECORD)
    files = [("a.txt", {"some-package": "2.1", "other": "1.0"})]
    monkeypatch.setattr(advisories, "ACCEPTED", {})
    said, good = advisories.check(found, files, date(2026, 8, 2))
    assert not good
    assert said[0] == "1 advisories of 2026-07-23, 10 days ago: a test. What became known since is not in it."
    assert said[1] == "a.txt: some-package 2.1 has PYSEC-1-1, CVE-1-1: NOT ACCEPTED"
    monkeypatch.setattr(advisories, "ACCEPTED", {("some-package", "PYSEC-1-1"): "no way in"})
    said, good = advisories.check(found, files, date(2026, 8, 2))
    assert (good, said[1]) == (True, "a.txt: some-package 2.1 has PYSEC-1-1, CVE-1-1: accepted: no way in")
    said, good = advisories.check(found, [("a.txt", {"some-package": "2.6"})], date(2026, 8, 2))
    assert (good, said[1]) == (
        False,
        "some-package has PYSEC-1-1 no more: remove it from ACCEPTED in tools/supply/advisories.py",
    )
