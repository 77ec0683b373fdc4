"""The parity reports that the matrices fill, the ranks that compute their cells, and the order in which they do."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import groupby

import pytest

from tests.themes.parallel.report import Report
from tests.world import World

ORDER = "CELL_ORDER"
"""The environment's seed of the order of cells; without one each run has its own."""
_seed = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed, the same in all workers of a run."""
    worker = getattr(config, "workerinput", {})
    config.stash[_seed] = os.environ.get(ORDER) or worker.get("testrunuid") or f"{random.randrange(10**6)}"


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to run the cells in this order again; with workers each failure says it."""
    return f"cells of matrices in an order of their own: {ORDER}={config.stash[_seed]} gives it again"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the cells of each file here in random order: what one leaves behind in its ranks, such as a process group, shows."""
    ordered = []
    for file, cells in groupby(items, key=lambda item: item.path):
        own = list(cells)
        if file.parent.name == "parallel":
            random.Random(f"{config.stash[_seed]}/{file.name}").shuffle(own)
        ordered += own
    items[:] = ordered


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Name the order beside each failure in it."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed and item.path.parent.name == "parallel":
        report.sections.append(("order of cells", f"{ORDER}={item.config.stash[_seed]}"))


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
