"""Whole runs on mixtures of experts: every rank hands its experts to the engine, which samples as the trainer computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config import Config
from megarl.errors import EngineError
from megarl.models.deepseek_v3 import READ_BY_SGLANG
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 12}
        | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_nextn_predict_layers": 0},
    ),
}


def model_folder(kind: str, tokenizer_from: Path, folder: Path, **more: Any) -> Path:
    """A random model of `kind` that speaks the tiny model's characters; `more` goes into its config."""
    prefix, settings = MODELS[kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_from)
    config = getattr(transformers, f"{prefix}Config")(vocab_size=len(tokenizer), **(SIZES | settings | more))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # transformers' 0.02 would leave every expert's output at zero
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_prediction_layer(folder: Path, target: Path) -> Path:
    """The model with a random layer for multi-token prediction."""
    source = HFFolder(folder)
    config = source.config | {"num_nextn_predict_layers": 1}
    weight_map = architecture_for(config).weight_map(config).with_prediction()
    generator = torch.Generator().manual_seed(1)
    tensors = {name: source.get_slice(name)[:] for name in source.names}
    for name, shape in weight_map.hf_shapes().items():
        if name not in tensors:
            centre = 1.0 if "norm" in name else 0.0
            tensors[name] = centre + 0.2 * torch.randn(shape, generator=generator)
    tensors |= {copy: tensors[original].clone() for copy, original in weight_map.copies}
    write_hf_folder(target, tensors.items(), config, extra_files_from=folder)
    return target


@pytest.mark.parametrize(
    ("kind", "layout", "own"),
    [
        # spread as the next one's experts are; SGLang is given this family's in tests/rollout/test_sglang_experts.py
        pytest.param("qwen3_moe", {"dp": 2, "ep": 2}, {}, id="qwen3_moe-dp2+ep2", marks=pytest.mark.exhaustive),
        pytest.param(
            "mixtral",
            {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
            {"policy.freeze": ["router"]},
            id="mixtral-tp2+ep2",
        ),
        pytest.param(
            "deepseek_v3",
            {"pp": 2},
            {"policy.experts": {"balance_coef": 1e-3, "bias_update_rate": 1e-3}, "policy.mtp": {"train": True}},
            id="deepseek_v3-pp2",
        ),
    ],
)
def test_after_each_sync_the_engine_samples_from_the_experts_that_were_trained(
    tiny_config: Callable[..., Config],
    tiny_model: Path,
    tmp_path: Path,
    kind: str,
    layout: dict[str, Any],
    own: dict[str, Any],
) -> None:
    folder = model_folder(kind, tiny_model, tmp_path / kind)
    if "policy.mtp" in own:
        folder = with_prediction_layer(folder, tmp_path / "predicting")
    config = tiny_config(
        **{"model.path": str(folder), "policy.layout": layout, "data.eval": None, "run.steps": 3, "run.export": True}, **own
    )
    gates = train(config)["gates"]
    assert gates["kl_to_reference_at_first_step"] < 1e-9
    assert gates["log_prob_max_difference_as_loaded"] < 1e-4
    assert gates["log_prob_max_difference_after_sync"] < 1e-4
    rows = read_metrics(Path(config.run_folder) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    samples = [json.loads(line) for line in (Path(config.run_folder) / "samples.jsonl").read_text().splitlines()]
    exported, before = HFFolder(Path(config.run_folder) / "model"), HFFolder(folder)
    assert set(exported.names) == set(before.names)
    for name in before.names:
        moved = float((exported.get_slice(name)[:] - before.get_slice(name)[:]).abs().max())
        assert moved < 1e-2
        is_own = name.startswith("model.layers.2.")
        assert moved > 0 or ".experts." not in name or is_own, name
        assert moved == 0 or ".gate." not in name or "policy.freeze" not in own, name
        assert moved > 0 or "e_score" not in name or is_own, name
        # of the layer for multi-token prediction no other layer is behind: an expert may see no token that is predicted
        assert moved > 0 or not is_own or ".experts." in name or "e_score" in name, name
    assert all(("policy/mtp_loss" in row, "policy/mtp_accuracy" in row) == ("policy.mtp" in own,) * 2 for row in rows)
    if "policy.mtp" in own:
        losses = [row["policy/mtp_loss"] for row in rows]
        assert losses[2] < losses[0]
        assert torch.equal(
            exported.get_slice("model.layers.2.embed_tokens.weight")[:], exported.get_slice("model.embed_tokens.weight")[:]
        )
    maps = read_metrics(Path(config.run_folder) / "experts.jsonl")
    assert [row["step"] for row in maps] == [1, 2, 3]
    for row, of_step in zip(rows, maps, strict=True):
        routed = of_step["policy"]
        assert routed["layers"] == ([1] if kind == "deepseek_v3" else [0, 1])
        worst = max(max(loads) for loads in routed["loads"])
        assert row["policy/expert_imbalance_max"] == pytest.approx(worst, abs=1e-3)  # with one update a step
        assert 0 < row["policy/router_entropy"] <= 1.3863
    assert {version for s in samples if s["step"] == 3 for version in s["weight_versions"]} == {2}


@pytest.mark.exhaustive  # tests/rollout/test_sglang_deepseek.py sends weights of this family to SGLang
def test_sglang_samples_from_the_latent_attention_and_experts_that_ranks_trained(
    tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path
) -> None:
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64, **READ_BY_SGLANG}
    config = tiny_config(
        **{
            "model.path": str(model_folder("deepseek_v3", tiny_model, tmp_path / "model", **sizes)),
            "policy.layout": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
            "rollout.engine": "sglang",
            "rollout.tp": 2,
            "rollout.engine_args": {"ep_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "data.eval": None,
            "run.steps": 3,
        }
    )
    gates = train(config)["gates"]
    assert gates["log_prob_max_difference_as_loaded"] < 1e-4
    assert gates["log_prob_max_difference_after_sync"] < 1e-4
    assert read_metrics(Path(config.run_folder) / "metrics.jsonl")[-1]["mismatch/log_prob_max"] < 1e-4


def test_a_model_that_sglang_cannot_be_given_is_refused_before_anything_is_loaded(
    tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path
) -> None:
    folder = model_folder("deepseek_v3", tiny_model, tmp_path / "deepseek_v3")
    config = tiny_config(**{"model.path": str(folder), "rollout.engine": "sglang", "data.eval": None})
    with pytest.raises(EngineError, match=r"rollout\.engine is 'sglang'.*it must be 'embedded'"):
        train(config)
    assert not list(Path(config.run_folder).rglob("engine-*.log"))
