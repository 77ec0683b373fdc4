"""One browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observe.chromium import Chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture
def opened(browser: Chromium, page: Path) -> Iterator[Chromium]:
    """The browser with the `page` of the file, which complains of nothing meanwhile."""
    browser.open(page)
    yield browser
    assert browser.complaints == []
