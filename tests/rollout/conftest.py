"""A tiny Llama with random weights on disk, and one SGLang server that the whole session shares."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.system.process_tree import tree_of
from tests.rollout.tiny import TINY, save_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return save_tiny(tmp_path_factory.mktemp("tiny-llama"), TINY)


@pytest.fixture(scope="session")
def sglang_engine(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """The shared server. Tests leave it awake and with complete weights of some version."""
    options = ServerOptions(
        str(tiny_path),
        tmp_path_factory.mktemp("sglang") / "server.log",
        threads=1,
        max_total_tokens=8192,
        max_running_requests=16,
        start_timeout_s=240,
    )
    engine = asyncio.run(SglangEngine.open(options))
    assert engine.server.pid is not None
    tree = tree_of(engine.server.pid)
    yield engine
    asyncio.run(engine.stop())
    assert len(tree) > 2  # the server, its scheduler and its detokenizer at least
    assert [process for process in tree if process.is_running()] == []


@pytest.fixture(scope="session")
def embedded_engine(tiny_path: Path) -> EmbeddedEngine:
    """The engine in this process, on the same model."""
    return EmbeddedEngine(tiny_path, max_batch_samples=8)


@pytest.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> EmbeddedEngine | SglangEngine:
    """Each engine in turn, behind the one protocol."""
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
