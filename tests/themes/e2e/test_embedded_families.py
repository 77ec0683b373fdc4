"""Whole runs of families that SGLang's servers cannot compute on a CPU: the embedded engine samples as the ranks compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from megarl.config import Config
from megarl.trainers.rl.train import train
from tests.families import build_folder

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3_next", {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, id="qwen3_next-tp2+ep2"),
        pytest.param("qwen3_5", {"pp": 2}, id="qwen3_5-pp2", marks=pytest.mark.exhaustive),
        pytest.param(
            "kimi_linear",
            {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
            id="kimi_linear-tp2+ep2",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("olmo_hybrid", {"tp": 2}, id="olmo_hybrid-tp2", marks=pytest.mark.exhaustive),
        pytest.param("smollm3", {"tp": 2}, id="smollm3-tp2", marks=pytest.mark.exhaustive),
        pytest.param("seed_oss", {"tp": 2}, id="seed_oss-tp2", marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", {"dp": 2, "ep": 2}, id="gpt_oss-dp2+ep2"),
    ],
)
def test_after_each_sync_the_engine_samples_what_was_trained(
    tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    folder = tmp_path / family
    build_folder(family, folder)
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    config = tiny_config(
        **{"model.path": str(folder), "policy.layout": layout, "policy.share_prefix": True, "data.eval": None, "run.steps": 3}
    )
    gates = train(config)["gates"]
    assert gates["log_prob_max_difference_as_loaded"] < 1e-4
    assert gates["log_prob_max_difference_after_sync"] < 1e-4
