"""Whole runs whose engine serves weights in few bits: the mismatch is that of the decoded weights, and is gone with rounding
in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config import Config
from megarl.config.layout import Layout
from megarl.models.hf_folder import HFFolder
from megarl.models.transformers_names import hub_tensors
from megarl.observe import read_metrics
from megarl.options.few_bits.formats import FORMATS
from megarl.options.few_bits.tensors import dequantised
from megarl.trainers.rl.train import train
from tests.convert.conftest import exported, imported, tensors

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def checkpoint(tiny_experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with experts as a distributed checkpoint, which is exported in few bits."""
    folder = tmp_path_factory.mktemp("imported") / "dist"
    imported(tiny_experts, folder, Layout())
    return folder


def decoded(folder: Path, served: Path, dtype: str) -> Any:
    """transformers' model of `folder` in float32 with the values that the quantised tensors of `served` stand for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    format, found = FORMATS[dtype], tensors(served)
    for name, weight in hub_tensors(model).items():
        if name + format.suffixes[1] in found:
            with torch.no_grad():
                weight.copy_(dequantised(found[name + format.suffixes[0]], found[name + format.suffixes[1]], format))
    return model.eval()


def log_probs(model: Any, sample: dict[str, Any]) -> torch.Tensor:
    """Of a sample's response, float64 `[L]`."""
    ids = torch.tensor([[*sample["prompt_ids"], *sample["response_ids"]]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(sample["prompt_ids"]) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(sample["response_ids"])[:, None])[:, 0]


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("int4-32", {"tp": 2, "etp": 2, "sequence_parallel": True}),
        pytest.param("mxfp8", {"pp": 3}, marks=pytest.mark.exhaustive),
        pytest.param("fp8-block", {"tp": 2, "etp": 2, "sequence_parallel": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_mismatch_of_a_run_is_that_of_the_decoded_weights(
    tiny_config: Callable[..., Config], tiny_experts: Path, checkpoint: Path, tmp_path: Path, dtype: str, layout: dict[str, Any]
) -> None:
    served = tmp_path / "served"
    exported(checkpoint, served, dtype=dtype)
    more = {
        "model.path": str(tiny_experts),
        "policy.layout": layout,
        "data.eval": None,
        "rollout.servers.model_path": str(served),
    }
    config = tiny_config(**more)
    train(config)
    first, _ = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if row["step"]]
    samples = [json.loads(line) for line in (Path(config.run_folder) / "samples.jsonl").read_text().splitlines()]
    trainer = transformers.AutoModelForCausalLM.from_pretrained(tiny_experts, dtype=torch.float32).eval()
    engine, differences = decoded(tiny_experts, served, dtype), []
    for sample in samples:
        if sample["step"] != 1:
            continue
        of_engine = log_probs(engine, sample)
        assert (of_engine - torch.tensor(sample["rollout_log_probs"]).double()).abs().max() < 1e-5
        differences.append((log_probs(trainer, sample) - of_engine).abs())
    together = torch.cat(differences)
    assert float(together.max()) > 1e-3
    assert first["mismatch/log_prob_abs"] == pytest.approx(float(together.mean()), abs=1e-5)
    assert first["mismatch/log_prob_max"] == pytest.approx(float(together.max()), abs=2e-5)


def test_with_rounding_in_training_no_mismatch_is_left(
    tiny_config: Callable[..., Config], tiny_experts: Path, checkpoint: Path, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    exported(checkpoint, served, dtype="int4-32")
    more = {"model.path": str(tiny_experts), "data.eval": None, "rollout.servers.model_path": str(served)}
    layout = {"dp": 2, "ep": 2}
    config = tiny_config(**more, **{"policy.layout": layout, "model.int4_experts": 32, "run.steps": 3, "run.export": True})
    train(config)
    steps = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if row["step"]]
    assert [step["mismatch/log_prob_max"] < 1e-5 for step in steps] == [True] * 3
    assert steps[0]["policy/grad_norm"] > 0
    # what is trained is not rounded, and has moved
    trained, before = tensors(Path(config.run_folder) / "model"), tensors(tiny_experts)
    moved = [name for name in before if ".experts." in name and not torch.equal(trained[name], before[name])]
    assert moved
    assert HFFolder(Path(config.run_folder) / "model").config.get("quantization_config") is None
