"""The bill of materials is what CycloneDX's schema allows, and says of every locked package what the lock does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.supply.scripts import ROOT, script

lock_file = script("lock_file")


def written(out: Path) -> str:
    """What the command writes, at a time that is given."""
    command = [sys.executable, str(ROOT / "tools/supply/sbom.py"), str(out)]
    subprocess.run(command, env=os.environ | {"SOURCE_DATE_EPOCH": "1790000000"}, check=True)
    return out.read_text()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("bill") / "folder" / "bill.json")


@pytest.fixture(scope="module")
def bill(text: str) -> dict:
    return json.loads(text)


def test_the_bill_follows_the_schema(text: str, bill: dict) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    bill = json.loads(text)
    bill["components"][0]["hashes"] = [{"alg": "SHA-256", "content": "no digest"}]
    assert validator.validate_str(json.dumps(bill)) is not None


def test_every_locked_package_is_in_it_with_all_its_hashes(bill: dict) -> None:
    locked = lock_file.read_lock(lock_file.lock_of())
    components = {entry["name"]: entry for entry in bill["components"]}
    assert len(components) == len(bill["components"])
    assert set(components) == {*locked, "torch", "uPlot"}
    for name, package in locked.items():
        entry = components[name]
        assert (entry["version"], entry["purl"]) == (package.version, f"pkg:pypi/{name}@{package.version}")
        (files,) = entry["externalReferences"]
        assert {(digest["alg"], digest["content"]) for digest in files["hashes"]} == {
            ("SHA-256", text) for text in package.hashes
        }
    assert "version" not in components["torch"]
    assert (components["uPlot"]["version"], components["uPlot"]["licenses"]) == ("1.6.32", [{"license": {"id": "MIT"}}])


def test_it_says_the_licence_of_what_is_installed_and_what_is_needed_to_run(bill: dict) -> None:
    licences = script("licences")
    installed = licences.installed()
    without = {entry["name"] for entry in bill["components"] if "licenses" not in entry}
    assert without & set(installed) == set()
    scopes = {entry["name"]: entry.get("scope") for entry in bill["components"]}
    assert {scopes[name] for name in ("ray", "pydantic-core", "torch", "starlette")} == {"required"}
    assert {scopes[name] for name in ("pytest", "mypy", "sglang", "mkdocs", "bandit")} == {"optional"}


def test_who_asks_for_whom_is_what_the_packages_say(bill: dict) -> None:
    depends = {entry["ref"].partition("==")[0]: entry.get("dependsOn", []) for entry in bill["dependencies"]}
    references = {entry["bom-ref"] for entry in bill["components"]}
    assert {reference for listed in depends.values() for reference in listed} <= references
    for name in ("rich", "aiohttp", "pydantic", "mypy", "huggingface-hub"):
        asked = map(Requirement, distribution(name).requires or ())
        expected = {canonicalize_name(one.name) for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})}
        assert {reference.partition("==")[0] for reference in depends[name]} == expected
    direct = {reference.partition("==")[0] for reference in depends["megarl"]}
    assert {"torch", "ray", "transformers", "pytest", "sglang", "shipped:megarl/observe/page/vendor/uplot.*"} <= direct
    assert not {"aiosignal", "pluggy"} & direct


def test_the_same_lock_makes_the_same_bill(text: str, tmp_path: Path) -> None:
    assert written(tmp_path / "again.json") == text
