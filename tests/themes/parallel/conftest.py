"""The parity report that the matrix fills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.themes.parallel.report import Report


@pytest.fixture(scope="session")
def parity_report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """Written to the document of `--parity-report` at the end of the run, if one is named."""
    report = Report()
    yield report
    document = request.config.getoption("--parity-report")
    if document is not None:
        report.write(document)
