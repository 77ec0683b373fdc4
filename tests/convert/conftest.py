"""What the tests of conversion share: tiny folders of every family, conversions in one line, folders compared byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.convert.plan import plan_dist, plan_hf
from megarl.convert.run import ConversionResult, run_plan
from megarl.convert.sources import open_dist, open_hf
from megarl.models.hf_folder import HFFolder
from tests.families import build_folder

REAL_MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny family (a key of `tests.families.VARIANTS`), built once."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            build_folder(family, root / family)
        return root / family

    return folder


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the real model."""
    if not (REAL_MODEL / "model.safetensors").exists():
        pytest.skip("models/SmolLM2-135M-Instruct is absent (make model)")
    return REAL_MODEL


def imported(folder: Path, target: Path, layout: Layout, dtype: str | None = None, **options: Any) -> ConversionResult:
    """`megarl convert import`."""
    return run_plan(plan_dist("import", open_hf(folder), layout, dtype), target, **options)


def resharded(folder: Path, target: Path, layout: Layout) -> ConversionResult:
    """`megarl convert reshard`."""
    return run_plan(plan_dist("reshard", open_dist(folder), layout, None), target)


def exported(
    folder: Path,
    target: Path,
    dtype: str | None = None,
    max_shard_bytes: int = 2**30,
    hf_config_from: Path | None = None,
    **options: Any,
) -> ConversionResult:
    """`megarl convert export`."""
    return run_plan(plan_hf("export", open_dist(folder, hf_config_from), dtype, max_shard_bytes), target, **options)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder, as the safetensors library reads it."""
    read = HFFolder(folder)
    return {name: read.get_slice(name)[...] for name in read.names}


def assert_same_tensors(found: Path, expected: Path) -> None:
    """Names, dtypes and every byte."""
    left, right = tensors(found), tensors(expected)
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype, name
        assert torch.equal(left[name].view(torch.uint8), tensor.view(torch.uint8)), name
