"""Fixtures that every room shares. The world of processes is started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.world import World


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--parity-report docs/parallelism.md` writes what tests/parallel measured into that document."""
    parser.addoption("--parity-report", type=Path, default=None, help="document that gets the parity matrix's table")


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes under Gloo that all distributed tests of the session share; use `world.call(..., size=2)` for fewer."""
    with World(4) as shared:
        yield shared
