"""The page on GPU paths names functions, tests and parts that are there, and every file that works on a GPU."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.docs.pages import DOCS, ROOT


@pytest.fixture(scope="module")
def gpu_paths() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_paths_page", ROOT / "tools/docs/gpu_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_table_but_for_numbers_of_lines(gpu_paths: ModuleType) -> None:
    assert gpu_paths.says_the_same(DOCS / "gpu_paths.md", gpu_paths.page()), "run `python tools/docs/generate.py`"
    assert not gpu_paths.says_the_same(DOCS / "gpu_paths.md", gpu_paths.page().replace("right", "wrong", 1))


def test_every_file_that_works_on_a_gpu_is_named(gpu_paths: ModuleType) -> None:
    assert gpu_paths.unnamed() == []
    assert gpu_paths.GPU_WORDS.search("stream = torch.cuda.Stream(device)")
    assert not gpu_paths.GPU_WORDS.search("device = torch.cuda.current_device()")


def test_every_doubt_has_what_decides_it_and_every_part_decides_something(gpu_paths: ModuleType) -> None:
    rows = [row for rows in gpu_paths.GROUPS.values() for row in rows]
    assert len(rows) > 40
    assert [row.what for row in rows if not row.decided] == []
    assert {row.verdict for row in rows} == set(gpu_paths.VERDICTS)
    asked = {one for row in rows for one in row.decided}
    assert [name for name in gpu_paths.part_names() if name not in asked] == []


@pytest.mark.parametrize(
    ("where", "decided", "missing"),
    [
        ("weights/cuda_ipc.py::gone", "ipc", "names gone of megarl/weights/cuda_ipc.py"),
        ("weights/cuda_ipc.py::shared", "no_part", "names no_part, which is neither a part"),
        ("weights/cuda_ipc.py::shared", "weights/test_cuda_ipc.py::test_gone", "names weights/test_cuda_ipc.py::test_gone"),
    ],
)
def test_what_is_gone_is_an_error(gpu_paths: ModuleType, where: str, decided: str, missing: str) -> None:
    row = gpu_paths.GpuPath("a path", (where,), "right", "why", (decided,))
    with pytest.raises(SystemExit, match=missing):
        gpu_paths._line(row)
