"""The parity reports that the matrices fill, and the ranks that compute their cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.themes.parallel.report import Report
from tests.world import World


@pytest.fixture(scope="session")
def parity_report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """Written to the document of `--parity-report` at the end of the run, if one is named."""
    yield from written(Report("parity matrix"), request)


@pytest.fixture(scope="session")
def seeing_report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """As `parity_report`, of models that see."""
    yield from written(Report("parity of models that see"), request)


def written(report: Report, request: pytest.FixtureRequest) -> Iterator[Report]:
    yield report
    document = request.config.getoption("--parity-report")
    if document is not None:
        report.write(document)


@pytest.fixture(scope="module")
def parity_world() -> Iterator[World]:
    """Eight ranks for all cells of a file."""
    with World(8) as world:
        yield world
