"""SGLang's tables of cosines and sines are those of megarl's frequencies wherever it is not refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models.rope import exact_positions, rope_refusal, rotary_scale
from megarl.models.rope_frequencies import inverse_frequencies
from tests.families.settings import LLAMA3_ROPE, LONGROPE, WIDE_YARN, YARN_ROPE
from tests.world import REPOSITORY

HEAD_DIM, POSITIONS = 12, 256
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": LLAMA3_ROPE,
    "yarn": WIDE_YARN,
    "yarn with both mscales": YARN_ROPE,
    "yarn untruncated": YARN_ROPE | {"truncate": False, "beta_fast": 8},
    "longrope": LONGROPE,
}
OTHERWISE = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    "attention factor": WIDE_YARN | {"attention_factor": 0.5},
    "long factor": LONGROPE | {"factor": 2.0},
}


def write_tables(path: str) -> None:
    """Write SGLang's cosines and sines `[T, d]` of every rope here; in a process of its own, which its stand-ins are for."""
    from megarl.rollout.engines.sglang.on_cpu import stand_ins

    stand_ins.install(Path(sys.prefix) / "sglang-cpu")
    from sglang.srt.layers.rotary_embedding import get_rope

    found = {}
    for name, rope in (ROPES | OTHERWISE).items():
        made = get_rope(HEAD_DIM, HEAD_DIM, POSITIONS, rope["rope_theta"], True, rope, torch.float32)
        found[name] = made.long_short_cos_sin_cache if rope["rope_type"] == "longrope" else made.cos_sin_cache
    torch.save(found, path)


@pytest.fixture(scope="module")
def by_sglang(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    path = tmp_path_factory.mktemp("rope") / "tables.pt"
    code = f"from tests.rollout.test_sglang_rope import write_tables; write_tables({str(path)!r})"
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=600, env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    )
    return torch.load(path)


def ours(rope: dict[str, Any]) -> torch.Tensor:
    """megarl's, of the positions for which frequencies are exact."""
    config = {"head_dim": HEAD_DIM, "max_position_embeddings": POSITIONS, "rope_parameters": rope}
    limit = exact_positions(config)
    positions = torch.arange(limit[0] if limit else POSITIONS)
    angles = positions[:, None].float() * inverse_frequencies(config, HEAD_DIM)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rotary_scale(config, HEAD_DIM)


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_sglang(by_sglang: dict[str, torch.Tensor], name: str) -> None:
    assert rope_refusal({"max_position_embeddings": POSITIONS, "rope_parameters": ROPES[name]}) is None
    found, table = ours(ROPES[name]), by_sglang[name]
    both = min(len(found), len(table))  # SGLang makes tables of YaRN longer where it must
    torch.testing.assert_close(found[:both], table[:both].float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_sglang_computes_otherwise_is_refused(by_sglang: dict[str, torch.Tensor], name: str) -> None:
    assert rope_refusal({"max_position_embeddings": POSITIONS, "rope_parameters": OTHERWISE[name]})
    found, table = ours(OTHERWISE[name]), by_sglang[name]
    both = min(len(found), len(table))
    assert float((found[:both] - table[:both]).abs().max()) > 0.05


def test_longrope_of_sglang_changes_beyond_the_positions_that_megarl_allows(by_sglang: dict[str, torch.Tensor]) -> None:
    short, long = (by_sglang["longrope"][start + 5] for start in (0, LONGROPE["original_max_position_embeddings"]))
    assert float((short - long).abs().max()) > 0.05
