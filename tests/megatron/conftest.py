"""Ranks that have Transformer Engine and no GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.world import REPOSITORY, World


@pytest.fixture(scope="session")
def engine_world() -> Iterator[World]:
    """Two ranks whose megatron-core finds Transformer Engine; skips where it cannot be imported, or where there is a GPU."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed: make test-transformer-engine")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/themes/gpu")
    command = [sys.executable, "-c", "import tests.megatron.engine_on_cpu"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode:
        pytest.skip(f"transformer_engine cannot be imported: {ran.stderr.splitlines()[-1]}")
    with World(2, first="tests.megatron.engine_on_cpu") as world:
        yield world
