"""Two nodes on one machine, each a network namespace, and the tiny model of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.themes.e2e.conftest import tiny_model as tiny_model  # a fixture
from tests.themes.multinode.namespaces import Network, why_not


def two_nodes() -> Iterator[Network]:
    """Nodes n1 and n2, for a fixture."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    with Network(2) as nodes:
        yield nodes


network = pytest.fixture(scope="session", name="network")(two_nodes)
