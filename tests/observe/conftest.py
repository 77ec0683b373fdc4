"""One browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.observe.chromium import Chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()
