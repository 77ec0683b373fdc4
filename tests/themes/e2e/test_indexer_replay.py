"""Replay of indexers' choices in whole runs: an engine that chooses other keys is followed, and without replay is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.option_list import OPTIONS
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.skipif("sparse_attention" not in OPTIONS, reason="this installation does not have the option")
CROOKED = f"{Path(__file__).parent / 'crooked_indexers.py'}:CrookedIndexers"


@pytest.fixture
def tiny_sparse(tiny_model: Path, tmp_path: Path) -> Path:
    """A random GLM-5 (4 layers, two of which share the choices of the one before, of 5 keys) that spells."""
    folder = tmp_path / "sparse"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GlmMoeDsaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1,
        first_k_dense_replace=1, index_n_heads=8, index_head_dim=8, index_topk=5, indexer_types=["full", "shared"] * 2,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=1,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/options/sparse_attention/test_followed_engine.py does it in one process
def test_an_engine_that_chooses_other_keys_is_followed(tiny_sparse: Path, tiny_config: Callable[..., Config]) -> None:
    def run(name: str, **overrides: Any) -> list[dict[str, Any]]:
        more = {
            "model.path": str(tiny_sparse), "data.eval": None, "run.name": name, "rollout.engine": CROOKED,
            "policy.share_prefix": True, "algorithm.kl": {"coef": 0.0},  # a reference does not replay
        }  # fmt: skip
        config = tiny_config(**more | overrides)
        train(config)
        return [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if row["step"]]

    for step in run("replayed", **{"policy.indexer": {"replay": "engine"}}):
        assert step["mismatch/log_prob_max"] < 1e-5
        assert step["indexer/differing"] > 0.5
        assert step["indexer/missing"] == 0
    [live] = run("live", **{"run.steps": 1})
    assert live["mismatch/log_prob_abs"] > 0.02
    assert "indexer/differing" not in live
