"""Known advisories against the locks, without a network: `python tools/supply/advisories.py` (`make advisories`).

The database is requirements/advisories.jsonl: all advisories of the Python Packaging Advisory Database about packages of PyPI,
cut to what decides whether a version is affected. Its first line says where it is from and of what day it is: what became known
later is not found. `--refresh SOURCE --origin TEXT --date DAY` writes it anew from a clone of that database, or from a zip file
of OSV records such as OSV's own of PyPI; `--database FILE` asks another file than the one of the repository.

Exit code 1: a locked version has an advisory that is not in ACCEPTED, or an entry of ACCEPTED has no such version any more.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from lock_file import REQUIREMENTS, locks, read_lock, read_pins
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

DATABASE = REQUIREMENTS / "advisories.jsonl"
PINNED = ("constraints-gpu.txt", "sglang-cpu.txt", "cookbook.txt", "transformer-engine.txt")
"""What is pinned without hashes is looked up, too."""

ACCEPTED: dict[tuple[str, str], str] = {
    (
        "diskcache",
        "PYSEC-2026-2447",
    ): "no release is without it, and outlines, which SGLang installs on GPU machines, asks for it: a "
    "cache in a folder that others write is unpickled; megarl opens none, and asks SGLang for no grammar",
}
"""(package, advisory) → why it is here all the same."""


@dataclass(frozen=True)
class Advisory:
    """An advisory about one package: affected are the versions of `ranges`, and those listed apart.

    A range is OSV's list of events, sorted: from `introduced` on ("0": the first version), before `fixed`, to `last_affected`.
    """

    identifier: str
    package: str
    aliases: tuple[str, ...]
    ranges: tuple[tuple[tuple[str, str], ...], ...]
    versions: tuple[str, ...] = ()

    def affects(self, version: str) -> bool:
        """Return whether a version is affected, as OSV's schema defines it: listed, or in a range."""
        return version in self.versions or any(in_range(events, Version(version)) for events in self.ranges)


def in_range(events: Iterable[tuple[str, str]], version: Version) -> bool:
    """Return whether a version is in a range of sorted events: the last event that it has reached decides."""
    affected = False
    for kind, bound in events:
        if kind == "introduced" and (bound == "0" or version >= Version(bound)):
            affected = True
        elif (kind == "fixed" and version >= Version(bound)) or (kind == "last_affected" and version > Version(bound)):
            affected = False
    return affected


@dataclass(frozen=True)
class Database:
    """Advisories by canonical name of the package, and what the first line of the file says of them."""

    origin: str
    date: str
    advisories: dict[str, list[Advisory]]

    def age_days(self, today: date) -> int:
        return (today - date.fromisoformat(self.date)).days


def read_database(path: Path = DATABASE) -> Database:
    """Read a database that `--refresh` wrote."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    found: dict[str, list[Advisory]] = {}
    for line in lines:
        ranges = tuple(tuple((kind, bound) for kind, bound in events) for events in line.get("ranges", ()))
        advisory = Advisory(line["id"], line["package"], tuple(line["aliases"]), ranges, tuple(line.get("versions", ())))
        found.setdefault(advisory.package, []).append(advisory)
    return Database(head["origin"], head["date"], found)


def affecting(database: Database, pins: dict[str, str]) -> Iterator[tuple[str, str, Advisory]]:
    """Yield package, version and advisory for each pin that has one. A local version (`+cpu`) is looked up without it."""
    for package, version in sorted(pins.items()):
        for advisory in database.advisories.get(package, ()):
            if advisory.affects(version.partition("+")[0]):
                yield package, version, advisory


def is_version(text: str) -> bool:
    """Return whether Python's packaging can compare it. Others are listed by old advisories, and no lock has one."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def comparable(text: str) -> str:
    """Return a bound of a range as a version: of `2.6.0-NA`, which is none, its release.

    Raises:
        InvalidVersion: it begins with no release either.
    """
    release = re.match(r"\d+(\.\d+)*", text)
    return text if is_version(text) or not release else release[0]


def sorted_events(events: Iterable[dict[str, str]]) -> list[tuple[str, str]]:
    """Return the events of a range in the order of their versions."""
    pairs = [(kind, comparable(version)) for event in events for kind, version in event.items()]
    return sorted(pairs, key=lambda pair: Version(pair[1]))


def reduced(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield of an OSV record what decides, for each package of PyPI that it names; nothing of one that was withdrawn.

    Listed versions that a range holds are left out: the outcome is the same without them.
    """
    if record.get("withdrawn"):
        return
    for affected in record.get("affected", ()):
        package = affected.get("package", {})
        if package.get("ecosystem") != "PyPI":
            continue
        ranges = [sorted_events(entry["events"]) for entry in affected.get("ranges", ()) if entry["type"] == "ECOSYSTEM"]
        listed = [text for text in map(str, affected.get("versions", ())) if is_version(text)]
        apart = [text for text in listed if not any(in_range(events, Version(text)) for events in ranges)]
        line = {
            "id": record["id"],
            "package": canonicalize_name(package["name"]),
            "aliases": sorted(record.get("aliases") or ()),
        }
        yield line | ({"ranges": ranges} if ranges else {}) | ({"versions": apart} if apart else {})


def records(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the OSV records of a clone (vulns/**/*.yaml) or of a zip file of JSON."""
    if source.is_dir():
        for path in sorted(source.glob("vulns/**/*.yaml")):
            yield yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return
    with zipfile.ZipFile(source) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".json"):
                yield json.loads(archive.read(name))


def refresh(source: Path, origin: str, day: str, path: Path) -> int:
    """Write the database of `source`; return how many lines it has."""
    lines = sorted(
        (line for record in records(source) for line in reduced(record)), key=lambda line: (line["package"], line["id"])
    )
    head = {"origin": origin, "date": date.fromisoformat(day).isoformat(), "licence": "CC-BY-4.0"}
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [head, *lines]))
    return len(lines)


def looked_up() -> list[tuple[str, dict[str, str]]]:
    """Return what is asked about: name of a file and its pins."""
    # torch is in no lock (requirements/lock.py): the build that is there
    torch = [("installed here", {"torch": metadata.version("torch")})] if find_spec("torch") else []
    locked = [(path.name, {name: package.version for name, package in read_lock(path).items()}) for path in locks()]
    return locked + torch + [(name, read_pins(REQUIREMENTS / name)) for name in PINNED]


def check(database: Database, files: list[tuple[str, dict[str, str]]], today: date) -> tuple[list[str], bool]:
    """Return what there is to say, one line each, and whether all of it is accepted."""
    advisories = sum(map(len, database.advisories.values()))
    age = database.age_days(today)
    said = [
        f"{advisories} advisories of {database.date}, {age} days ago: {database.origin}. What became known since is not in it."
    ]
    met, good = set(), True
    for file, pins in files:
        for package, version, advisory in affecting(database, pins):
            key = (package, advisory.identifier)
            met.add(key)
            reason = ACCEPTED.get(key)
            good = good and reason is not None
            names = ", ".join((advisory.identifier, *advisory.aliases))
            said.append(f"{file}: {package} {version} has {names}: {f'accepted: {reason}' if reason else 'NOT ACCEPTED'}")
    for package, identifier in sorted(ACCEPTED.keys() - met):
        good = False
        said.append(f"{package} has {identifier} no more: remove it from ACCEPTED in tools/supply/advisories.py")
    return [*said, f"{sum(len(pins) for _, pins in files)} pins of {len(files)} files, {len(met)} with an advisory"], good


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the locks against known advisories, without a network.")
    parser.add_argument("--database", type=Path, default=DATABASE, help="file to ask, or with --refresh to write")
    parser.add_argument("--refresh", type=Path, metavar="SOURCE", help="write it from a clone or a zip file of OSV records")
    parser.add_argument("--origin", help="with --refresh: where SOURCE is from, with its commit")
    parser.add_argument("--date", help="with --refresh: of what day SOURCE is, as 2026-07-23")
    arguments = parser.parse_args()
    if arguments.refresh:
        if not (arguments.origin and arguments.date):
            parser.error("--refresh needs --origin and --date: what is printed at every check")
        written = refresh(arguments.refresh, arguments.origin, arguments.date, arguments.database)
        print(f"{written} advisories written to {arguments.database}")
        return 0
    said, good = check(read_database(arguments.database), looked_up(), date.today())
    print(*said, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
