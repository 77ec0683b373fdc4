"""Whole runs of a mixture of experts whose routing is replayed: the engine's choice, or that of the trainer's own old pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megarl.config import Config
from megarl.models.check_layouts import check_models
from megarl.observe import read_metrics
from megarl.trainers.rl.loop import train

CROOKED = f"{Path(__file__).parent / 'crooked_engine.py'}:CrookedEngine"


@pytest.fixture(scope="module")
def tiny_experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE (3 layers with 6 experts each, of which a token uses 2) that spells as the tiny model does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    folder = tmp_path_factory.mktemp("models") / "experts"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=1,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def run(tiny_experts: Path, tiny_config: Callable[..., Config]) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]:
    """`run(name, **overrides)`: the metrics of the run's steps and its exported weights."""

    def go(name: str, **overrides: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        more = {"model.path": str(tiny_experts), "data.eval": None, "run.name": name, "run.export": True, "run.steps": 2}
        config = tiny_config(**more | overrides)
        train(config)
        folder = Path(config.run_folder)
        metrics = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
        return metrics, load_file(folder / "model" / "model.safetensors")

    return go


@pytest.mark.slow
def test_an_engine_that_routes_otherwise_is_followed(run: Callable[..., Any]) -> None:
    replayed = {"policy.routing": {"replay": "engine", "compare_every": 1}, "policy.share_prefix": True}
    for step in run("crooked", **replayed, **{"rollout.engine": CROOKED})[0]:
        assert step["mismatch/log_prob_max"] < 1e-5
        assert step["routing/live_log_prob_abs"] > 0.05
        assert step["routing/differing"] > 0.5
        assert step["routing/missing"] == 0


@pytest.mark.slow
def test_replaying_the_choices_that_the_trainer_would_make_changes_no_bit(run: Callable[..., Any]) -> None:
    metrics, found = run("engine", **{"policy.routing.replay": "engine"})
    assert [(step["routing/differing"], step["routing/missing"]) for step in metrics] == [(0, 0)] * 2
    _, expected = run("live")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.slow
def test_later_updates_go_where_the_old_pass_went(run: Callable[..., Any]) -> None:
    large = {
        "policy.optimizer": {"lr": 0.03},
        "algorithm.mini_batches": 2,
        "policy.layout": {"pp": 3},
        "policy.share_prefix": True,
    }
    metrics, replayed = run("old policy", **large, **{"policy.routing.replay": "old_policy"})
    _, live = run("live", **large)
    assert all(step["routing/missing"] == 0 for step in metrics)
    assert any(step["routing/differing"] > 0 for step in metrics)  # the second update's router would choose otherwise
    assert any(not torch.equal(replayed[name], live[name]) for name in live)


def test_a_model_without_experts_has_nothing_to_replay(tiny_config: Callable[..., Config]) -> None:
    from megarl.errors import ConfigError

    with pytest.raises(ConfigError, match=r"policy.routing.replay is 'engine', which is for mixtures of experts"):
        check_models(tiny_config(**{"policy.routing.replay": "engine"}))
