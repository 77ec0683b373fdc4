"""Whether this machine multiplies bfloat16 is read from /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.system import processor
from tests.config.smallest import config

FLAGS = {
    "avx512_bf16": "flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n",
    "amx": "processor\t: 0\nflags\t\t: fpu avx2 amx_tile amx_bf16\n",
    "avx512": "flags\t\t: fpu avx2 avx512f avx512_vnni amx_tile\n",
    "arm": "Features\t: fp asimd\n",
}


@pytest.mark.parametrize(("which", "dtype"), [("avx512_bf16", True), ("amx", True), ("avx512", False), ("arm", False)])
def test_a_processor_has_it_by_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str, *, dtype: bool) -> None:
    (tmp_path / "cpuinfo").write_text(FLAGS[which])
    monkeypatch.setattr(processor, "PROC", tmp_path)
    assert processor.computes_bfloat16() is dtype


def test_a_machine_with_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version\n")
    monkeypatch.setattr(processor, "PROC", tmp_path)
    assert processor.computes_bfloat16()


def test_without_proc_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor, "PROC", tmp_path)
    assert not processor.computes_bfloat16()


@pytest.mark.parametrize(("has_it", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_the_type_that_the_machine_is_best_at(monkeypatch: pytest.MonkeyPatch, *, has_it: bool, dtype: str) -> None:
    monkeypatch.setattr("megarl.config.sections.computes_bfloat16", lambda: has_it)
    assert config("model.dtype=auto").model.dtype == dtype
    assert config("model.dtype=float32").model.dtype == "float32"
    assert config().model.dtype == "bfloat16"


def test_a_wrong_type_is_told_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype is 'half'; it must be 'auto', 'float32' or 'bfloat16'"):
        config("model.dtype=half")


@pytest.mark.parametrize(
    ("which", "dtype", "warns"), [("avx512", "bfloat16", True), ("avx512", "float32", False), ("amx", "bfloat16", False)]
)
def test_bfloat16_where_it_is_slow_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str, dtype: str, *, warns: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(FLAGS[which])
    monkeypatch.setattr(processor, "PROC", tmp_path)
    assert bool(processor.slow_bfloat16(dtype)) is warns
