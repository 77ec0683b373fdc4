"""Engines of FP8 models are refused, before they start, on GPUs where SGLang changes the layout of what it loaded."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import ConfigError, EngineError
from megarl.options.few_bits.formats import FP8, MXFP8, FewBits, int4
from megarl.options.few_bits.sglang import check_fp8_layout, check_weight_layout
from megarl.rollout.engines.sglang import engine
from megarl.rollout.engines.sglang.server import ServerOptions
from tests.families import build_folder
from tests.options.few_bits.test_served_formats import config_of, served

TRITON = {"fp8_gemm_runner_backend": "triton"}
DEEP_GEMM = {"fp8_gemm_runner_backend": "deep_gemm"}
EXPERTS = {**TRITON, "moe_runner_backend": "deep_gemm"}


@pytest.mark.parametrize(
    ("capability", "arguments", "named"),
    [
        ((10, 0), {}, "fp8_gemm_runner_backend is 'auto'"),
        ((10, 3), DEEP_GEMM, "fp8_gemm_runner_backend is 'deep_gemm'"),
        ((12, 1), DEEP_GEMM, "fp8_gemm_runner_backend is 'deep_gemm'"),
        ((10, 0), EXPERTS, "moe_runner_backend is 'deep_gemm'"),
        ((12, 0), EXPERTS, "moe_runner_backend is 'deep_gemm'"),
        ((8, 0), TRITON, "remove rollout.servers.model_path"),
    ],
)
def test_a_layout_that_changes_is_refused(capability: tuple[int, int], arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineError, match=re.escape(named)):
        check_fp8_layout(arguments, capability)


@pytest.mark.parametrize(
    ("capability", "arguments"),
    [((9, 0), {}), ((9, 0), {**DEEP_GEMM, **EXPERTS}), ((8, 9), {}), ((10, 0), TRITON), ((11, 0), {}), ((12, 0), DEEP_GEMM)],
)
def test_any_other_is_not(capability: tuple[int, int], arguments: dict[str, Any]) -> None:
    check_fp8_layout(arguments, capability)


MXFP8_EXPERTS = "moe_runner_backend is 'auto'.*in mxfp8.*it must be 'cutlass'"
REPACKED = [
    (MXFP8, {}, (9, 0), "serves no MXFP8 model on GPUs of compute capability 9.0"),
    (MXFP8, {}, (12, 0), "serves no MXFP8 model on GPUs of compute capability 12.0"),
    (MXFP8, {}, (10, 0), MXFP8_EXPERTS),
    (MXFP8, {"moe_runner_backend": "deep_gemm"}, (10, 0), "'deep_gemm'.*it must be 'cutlass'"),
    (int4(32), {}, (10, 0), "'auto'.*in int4.*it must be 'marlin'"),
    (int4(32), {"moe_runner_backend": "triton"}, (9, 0), "'triton'.*it must be 'marlin'"),
    (FP8, {}, (10, 0), "fp8_gemm_runner_backend is 'auto'"),
]


@pytest.mark.parametrize(("format", "arguments", "capability", "named"), REPACKED)
def test_other_formats_are_refused_where_they_are_repacked(
    format: FewBits, arguments: dict[str, Any], capability: tuple[int, int], named: str
) -> None:
    with pytest.raises(EngineError, match=named):
        check_weight_layout(format, arguments, capability, has_experts=True)


@pytest.mark.parametrize(
    ("format", "arguments", "capability", "has_experts"),
    [
        (MXFP8, {}, (10, 0), False),
        (MXFP8, {"moe_runner_backend": "cutlass"}, (10, 3), True),
        (int4(32), {}, (8, 0), True),
        (int4(32), {"moe_runner_backend": "marlin"}, (10, 0), True),
        (FP8, {}, (9, 0), True),
    ],
)
def test_and_are_served_where_they_are_not(
    format: FewBits, arguments: dict[str, Any], capability: tuple[int, int], has_experts: bool
) -> None:
    check_weight_layout(format, arguments, capability, has_experts=has_experts)


def test_the_engine_asks_before_it_starts_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_folder("llama", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantisation}))
    monkeypatch.setattr(engine, "compute_capability", lambda: (10, 0))
    monkeypatch.setattr(engine.SglangServer, "start", lambda server: pytest.fail("a server was started"))
    options = ServerOptions(str(tmp_path / "model"), tmp_path / "log", device="cuda", dtype="bfloat16")
    with pytest.raises(EngineError, match="packs the scales anew"):
        asyncio.run(engine.SglangEngine.open(options))


def test_updates_of_what_changed_alone_are_refused_where_the_rest_was_repacked(tmp_path: Path) -> None:
    build_folder("mixtral-wide", tmp_path / "model")
    sglang = {"rollout__engine": "sglang", "rollout__delta_every": 3}
    for format in (MXFP8, int4(32)):
        config = config_of(tmp_path / "model", served(tmp_path / "model", format), **sglang)
        with pytest.raises(ConfigError, match=rf"rollout.delta_every is 3, .*repacked it.* is in {format.name}; it must be 0"):
            engine.SglangEngine.check(config, "cuda")
    engine.SglangEngine.check(config_of(tmp_path / "model", served(tmp_path / "model", FP8), **sglang), "cuda")
