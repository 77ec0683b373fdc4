"""What tests on a GPU share: they are skipped without one, and get a world of one rank under NCCL."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank of a world; megatron-core's groups are made for one rank, and forgotten afterwards."""
    from megarl import platform

    here = platform.install()
    here.set_device(0)
    torch.distributed.init_process_group(
        here.collective_backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    from megatron.core import parallel_state, tensor_parallel

    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout

    initialize_layout(Layout(), seed=1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        tensor_parallel.get_cuda_rng_tracker().reset()
        torch.distributed.destroy_process_group()
        torch.cuda.empty_cache()


@pytest.fixture
def transformer_engine(rank: None) -> Any:
    """Transformer Engine, in the world of `rank`; skips where it cannot be imported."""
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"transformer_engine cannot be imported: {error}")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model of `tests.themes.gpu.models`, each written once."""
    from tests.themes.gpu.models import write_folder

    written: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in written:
            written[family] = tmp_path_factory.mktemp("models") / family
            write_folder(family, written[family])
        return written[family]

    return folder
