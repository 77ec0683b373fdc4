"""The bill of materials of a release, in CycloneDX 1.6 JSON: `python tools/supply/sbom.py OUT.json` (`make sbom`).

It lists what the lock of this Python names, with the hashes of every file that the index has of it, who asks for whom, and the
licence that each package says of itself where it is installed; torch, of which the machine has a build of its own; and the work
of others that megarl's package ships (THIRD_PARTY.md). The same lock, environment and version of megarl make the same file, but
for the time, which SOURCE_DATE_EPOCH sets.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from licences import installed, licence
from lock_file import Locked, lock_of, read_lock, setup_lists
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from third_party import ROOT, Row, rows

MEGARL = re.search(r'^__version__ = "(.+)"$', (ROOT / "megarl/version.py").read_text(), re.M)[1]  # type: ignore[index]


def required(locked: dict[str, Locked]) -> set[str]:
    """Return what megarl needs to run: REQUIRES of setup.py, and what that asks for. The rest of a lock is of extras."""
    found = {canonicalize_name(Requirement(text).name) for text in setup_lists()["REQUIRES"]}
    while more := {name for name, entry in locked.items() if name not in found and found & set(entry.asked_by)}:
        found |= more
    return found


def package(name: str, locked: Locked, expression: str, scope: ComponentScope) -> Component:
    """Return the component of a locked package; `expression` is its licence, or empty."""
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"https://pypi.org/project/{name}/{locked.version}/#files"),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in locked.hashes],
        comment="one hash for each file that may be installed",
    )
    return Component(
        name=name,
        version=locked.version,
        type=ComponentType.LIBRARY,
        scope=scope,
        bom_ref=f"{name}=={locked.version}",
        purl=PackageURL("pypi", None, name, locked.version),
        licenses=[LicenseFactory().make_from_string(expression)] if expression else [],
        external_references=[files],
    )


def vendored(row: Row) -> Component:
    """Return the component of files of others that megarl ships; its source begins with a name and a version."""
    name, release = row.source.partition(",")[0].split()
    return Component(
        name=name,
        version=release,
        type=ComponentType.LIBRARY,
        bom_ref=f"shipped:{row.path}",
        description=f"{row.what} ({row.path})",
        licenses=[LicenseFactory().make_with_id(row.licence.partition(",")[0])],
    )


def bill(lock: Path) -> Bom:
    """Return the bill of materials of a lock."""
    locked = read_lock(lock)
    megarl = Component(
        name="megarl",
        version=MEGARL,
        type=ComponentType.APPLICATION,
        bom_ref=f"megarl=={MEGARL}",
        purl=PackageURL("pypi", None, "megarl", MEGARL),
        licenses=[LicenseFactory().make_with_id("Apache-2.0")],
    )
    said = {name: licence(found) for name, found in installed().items() if found.version == locked[name].version}
    scopes = dict.fromkeys(locked, ComponentScope.OPTIONAL) | dict.fromkeys(required(locked), ComponentScope.REQUIRED)
    parts = {name: package(name, entry, said.get(name, ""), scopes[name]) for name, entry in locked.items()}
    parts["torch"] = Component(
        name="torch",
        type=ComponentType.LIBRARY,
        bom_ref="torch",
        purl=PackageURL("pypi", None, "torch"),
        scope=ComponentScope.REQUIRED,
        description="the machine's own build: its version, files and licence are not in the lock",
    )
    shipped = [vendored(row) for row in rows() if row.shipped and row.licence != "facts"]
    serial = uuid5(NAMESPACE_URL, f"megarl {MEGARL} {hashlib.sha256(lock.read_bytes()).hexdigest()}")
    bom = Bom(components=[*parts.values(), *shipped], serial_number=serial)
    bom.metadata.component = megarl
    bom.metadata.timestamp = datetime.fromtimestamp(
        int(os.environ.get("SOURCE_DATE_EPOCH") or datetime.now(UTC).timestamp()), UTC
    )
    bom.metadata.tools.components.add(
        Component(name="cyclonedx-python-lib", version=version("cyclonedx-python-lib"), type=ComponentType.LIBRARY)
    )
    asked: dict[str, list[Component]] = {"megarl": [parts["torch"], *shipped]}
    for name, entry in locked.items():
        for asker in entry.asked_by:
            asked.setdefault(asker, []).append(parts[name])
    bom.register_dependency(megarl, asked["megarl"])
    for name, part in parts.items():
        bom.register_dependency(part, asked.get(name, []))
    return bom


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the bill of materials of this Python's lock, in CycloneDX 1.6 JSON.")
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    name = ROOT / "build" / f"megarl-{MEGARL}-py{python.replace('.', '')}.cdx.json"
    parser.add_argument("out", type=Path, nargs="?", default=name, help=f"file to write (default: build/{name.name})")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    bom = bill(lock_of())
    out.write_text(JsonV1Dot6(bom).output_as_string(indent=1) + "\n")
    print(f"{len(bom.components)} components of megarl {MEGARL} for Python {python} in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
