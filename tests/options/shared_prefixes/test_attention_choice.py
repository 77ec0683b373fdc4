"""Which roles share prefixes by attention over segments, and when it pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.models.flops import FlopsModel
from megarl.options.shared_prefixes.attention_choice import fits, sharing_pays
from megarl.workers.role_specs import shares_prefixes
from tests.trainers.test_prefix_sharing import FLOPS, LLAMA, SIZES, config

DEEPSEEK = LLAMA.with_name("deepseek-v3")


@pytest.mark.parametrize("spec", ["transformer_engine", "local"])
def test_what_the_config_says_holds_and_auto_is_where_it_pays(spec: str) -> None:
    for sizes in SIZES:
        assert shares_prefixes(config(True, *sizes), spec, FLOPS)
        assert not shares_prefixes(config(False, *sizes), spec, FLOPS)
    pays, does_not = SIZES
    assert shares_prefixes(config("auto", *pays), spec, FLOPS)
    assert not shares_prefixes(config("auto", *does_not), spec, FLOPS)


def test_sharing_pays_where_prompts_save_more_than_slower_attention_takes() -> None:
    assert not sharing_pays(FLOPS, 2048, 1024, 1)
    plain = FlopsModel(per_token=100, per_logit_row=0, per_pair=1)
    # a prompt of 10 saves 10 * 100 + 55, attention of both responses behind it is 55 + 2 * pairs
    for response in range(1, 60):
        pairs = 55 + 2 * sum(10 + place for place in range(1, response + 1))
        assert sharing_pays(plain, 10, response, 2) == (pairs < 1055)


@pytest.mark.parametrize(
    ("folder", "platform", "dtype", "megatron", "fit"),
    [
        (LLAMA, "cpu", "float32", {}, True),
        (LLAMA, "cuda", "bfloat16", {}, True),
        (LLAMA, "cuda", "float32", {}, False),
        (DEEPSEEK, "cuda", "bfloat16", {}, False),
        (LLAMA, "cuda", "bfloat16", {"fp8_dot_product_attention": True}, False),
        (LLAMA, "cuda", "bfloat16", {"fp8_dot_product_attention": False}, True),
    ],
)
def test_roles_whose_layers_cannot_share_keep_their_attention(
    folder: Path, platform: str, dtype: str, megatron: dict[str, Any], fit: bool
) -> None:
    assert fits(str(folder), platform, dtype, megatron) is fit
