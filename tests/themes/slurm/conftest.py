"""One Slurm of two nodes for the session, and the tiny model of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.themes.e2e.conftest import tiny_model as tiny_model  # a fixture
from tests.themes.slurm.cluster import Slurm, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A real Slurm with the nodes n1 and n2."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm here: {reason}")
    with Slurm(2) as cluster:
        yield cluster
