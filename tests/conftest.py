"""Fixtures that every room shares. The world of processes is started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.world import World


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--parity-report docs/parallelism.md` writes what tests/themes/parallel measured into that document."""
    parser.addoption("--parity-report", type=Path, default=None, help="document that gets the parity matrix's table")


STARTED_PROCESSES = {"world", "parity_world", "local_ray", "sglang_engine"}
"""Fixtures that start other processes: who asks for one is slow, and need not be marked as such."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Complete the marks that `make test-quick` and `make test` choose by (pyproject.toml says what they mean)."""
    for item in items:
        if STARTED_PROCESSES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes under Gloo that all distributed tests of the session share; use `world.call(..., size=2)` for fewer."""
    with World(4) as shared:
        yield shared


@pytest.fixture(scope="session")
def _shared_ray() -> Iterator[ExitStack]:
    with ExitStack() as ray_and_its_workers:
        yield ray_and_its_workers


@pytest.fixture
def local_ray(_shared_ray: ExitStack) -> None:
    """Ray that every run of the session joins instead of starting its own; begun anew where a test has ended it."""
    import ray

    from tests.warm_workers import WarmWorkers

    if ray.is_initialized():
        return
    _shared_ray.close()
    workers = _shared_ray.enter_context(WarmWorkers())
    settings = {"include_dashboard": False, "object_store_memory": 512 * 2**20, "log_to_driver": False}
    ray.init(address="local", num_cpus=8, runtime_env={"py_executable": workers.python}, **settings)
    _shared_ray.callback(ray.shutdown)
    workers.start()
