"""Which roles share prefixes, with which attention; and what a step tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, parse_config
from megarl.models.flops import FlopsModel, sharing_pays
from megarl.models.shape import ModelShape
from megarl.models.update_flops import UpdateFlops
from megarl.options.shared_prefixes.choice import core_attention, shares_prefixes
from megarl.trainers.run.timeline import throughput
from megarl.workers.rank_calls import RankRecord

MODELS = Path(__file__).resolve().parents[2] / "examples/models"
LLAMA, DEEPSEEK = MODELS / "llama-3.1-70b", MODELS / "deepseek-v3"
FLOPS = FlopsModel.of(ModelShape.read(LLAMA))


def config(share: Any, prompt: int, response: int, group: int) -> Config:
    found = parse_config(
        {
            "model": {"path": str(LLAMA)},
            "policy": {"share_prefix": share, "max_tokens_per_micro_batch": 65600},
            "algorithm": {"name": "grpo"},
            "data": {"train": {"source": "reasoning_gym", "name": "chain_sum"}, "max_prompt_tokens": prompt},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": group, "max_new_tokens": response},
            "rewards": [{"name": "exact_number"}],
        }
    )
    assert isinstance(found, Config)
    return found


@pytest.mark.parametrize("spec", ["reference", "transformer_engine", "local"])
def test_what_the_config_says_holds_and_auto_is_where_it_pays(spec: str) -> None:
    pays, does_not = (4096, 2048, 8), (64, 65536, 2)
    for sizes in (pays, does_not):
        assert shares_prefixes(config(True, *sizes), spec, FLOPS)
        assert not shares_prefixes(config(False, *sizes), spec, FLOPS)
    assert shares_prefixes(config("auto", *pays), spec, FLOPS)
    assert shares_prefixes(config("auto", *does_not), spec, FLOPS) == (spec == "reference")


def test_sharing_pays_where_prompts_save_more_than_slower_attention_takes() -> None:
    assert not sharing_pays(FLOPS, 2048, 1024, 1)
    plain = FlopsModel(per_token=100, per_logit_row=0, per_pair=1)
    # a prompt of 10 saves 10 * 100 + 55, attention of both responses behind it is 55 + 2 * pairs
    for response in range(1, 60):
        pairs = 55 + 2 * sum(10 + place for place in range(1, response + 1))
        assert sharing_pays(plain, 10, response, 2) == (pairs < 1055)


@pytest.mark.parametrize(
    ("spec", "folder", "platform", "dtype", "megatron", "attention"),
    [
        ("reference", LLAMA, "cuda", "bfloat16", {}, "spec"),
        ("local", LLAMA, "cpu", "float32", {}, "segments"),
        ("transformer_engine", LLAMA, "cuda", "bfloat16", {}, "segments"),
        ("transformer_engine", LLAMA, "cuda", "float32", {}, "spec"),
        ("transformer_engine", DEEPSEEK, "cuda", "bfloat16", {}, "spec"),
        ("transformer_engine", LLAMA, "cuda", "bfloat16", {"fp8_dot_product_attention": True}, "spec"),
        ("transformer_engine", LLAMA, "cuda", "bfloat16", {"fp8_dot_product_attention": False}, "segments"),
    ],
)
def test_roles_whose_layers_cannot_share_keep_their_attention(
    spec: str, folder: Path, platform: str, dtype: str, megatron: dict[str, Any], attention: str
) -> None:
    assert core_attention(spec, str(folder), platform, dtype, megatron) == attention


def test_a_step_tells_the_tokens_that_it_computed_and_those_that_it_saved() -> None:
    found = throughput(UpdateFlops(10, 0, 60, 80), [RankRecord([("update", 0.0, 1.0)], 0, 0.0)], None)
    assert (found["policy/computed_tokens"], found["policy/shared_tokens"]) == (60, 0.25)
