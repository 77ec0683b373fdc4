"""Whole runs of families that SGLang's servers cannot compute on a CPU: the embedded engine samples as the ranks compute."""

from __future__ import annotations

import json
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
        pytest.param("granite_hybrid", {"cp": 2}, id="granite_hybrid-cp2", marks=pytest.mark.exhaustive),
        pytest.param("nemotron_h", {"tp": 2}, id="nemotron_h-tp2", marks=pytest.mark.exhaustive),
        pytest.param("smollm3", {"tp": 2}, id="smollm3-tp2", marks=pytest.mark.exhaustive),
        pytest.param("seed_oss", {"tp": 2}, id="seed_oss-tp2", marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", {"dp": 2, "ep": 2}, id="gpt_oss-dp2+ep2"),
        *(
            pytest.param(mixture, {"dp": 2, "ep": 2}, id=f"{mixture}-dp2+ep2", marks=pytest.mark.exhaustive)
            for mixture in ("minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "solar_open", "afmoe")
        ),
        *(
            pytest.param(dense, {"tp": 2}, id=f"{dense}-tp2", marks=pytest.mark.exhaustive)
            for dense in ("ernie4_5", "hunyuan_v1_dense")
        ),
        pytest.param("ministral3", {"cp": 2}, id="ministral3-cp2", marks=pytest.mark.exhaustive),
        pytest.param("exaone4", {"tp": 2}, id="exaone4-tp2", marks=pytest.mark.exhaustive),
        pytest.param("exaone_moe", {"dp": 2, "ep": 2}, id="exaone_moe-dp2+ep2", marks=pytest.mark.exhaustive),
        pytest.param(
            "llama4", {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, id="llama4", marks=pytest.mark.exhaustive
        ),
        pytest.param("gemma2", {"tp": 2}, id="gemma2-tp2", marks=pytest.mark.exhaustive),
        pytest.param("step3p5", {"dp": 2, "ep": 2}, id="step3p5-dp2+ep2", marks=pytest.mark.exhaustive),
        pytest.param("mimo_v2", {"dp": 2, "ep": 2}, id="mimo_v2-dp2+ep2", marks=pytest.mark.exhaustive),
        pytest.param("longcat_flash", {"dp": 2, "ep": 2}, id="longcat_flash-dp2+ep2", marks=pytest.mark.exhaustive),
        pytest.param("gemma4", {"tp": 2}, id="gemma4-tp2", marks=pytest.mark.exhaustive),
        pytest.param("gemma4_moe", {"dp": 2, "ep": 2}, id="gemma4_moe-dp2+ep2", marks=pytest.mark.exhaustive),
        pytest.param("glm4_moe_lite", {"dp": 2, "ep": 2}, id="glm4_moe_lite-dp2+ep2", marks=pytest.mark.exhaustive),
        pytest.param("mistral4", {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, id="mistral4-tp2+ep2"),
        pytest.param("glm_moe_dsa", {"cp": 2}, id="glm_moe_dsa-cp2"),
        pytest.param(
            "deepseek_v4",
            {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
            id="deepseek_v4-tp2+ep2",
            marks=pytest.mark.exhaustive,
        ),
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


def test_engines_choose_keys_by_the_indexers_that_were_trained(
    tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "deepseek_v32"
    build_folder("deepseek_v32", folder)
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    settings = {"model.path": str(folder), "policy.layout": {"pp": 2}, "data.eval": None, "run.steps": 3}
    config = tiny_config(**settings, **{"policy.indexer": {"train": "sparse", "loss_coeff": 20.0}})
    gates = train(config)["gates"]
    assert gates["log_prob_max_difference_after_sync"] < 1e-4
    rows = map(json.loads, (Path(config.run_folder) / "metrics.jsonl").read_text().splitlines())
    divergence = [row["indexer/divergence"] for row in rows if "indexer/divergence" in row]
    assert len(divergence) == 3
    assert 0 < divergence[-1] < divergence[0]
