"""Planned memory of a role that trains adapters, against the tensors of real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.layout import Layout
from megarl.options.lora.weight_map import Lora
from tests.planning.test_memory import SP, Case, assert_planned
from tests.world import World

LORA = Lora(rank=16, alpha=16.0)
CASES = [
    Case("llama", Layout(), {"lora": LORA}),
    Case("llama", Layout(), {"lora": replace(LORA, targets=("q_proj", "down_proj"))}),
    Case("llama", Layout(**SP, pp=2), {"dtype": "bfloat16", "lora": LORA}, micro_batches=4),
    Case("qwen3_moe", Layout(dp=2, ep=2), {"dtype": "bfloat16", "lora": LORA}),
    Case("deepseek_v3", Layout(), {"recompute": "full", "lora": LORA}),
    Case("llama", Layout(), {"lora": replace(LORA, targets=("all-linear", "lm_head"))}),
    Case(
        "llama",
        Layout(**SP, pp=2),
        {"dtype": "bfloat16", "lora": replace(LORA, targets=("lm_head", "q_proj"))},
        micro_batches=4,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planned_memory_with_adapters_is_what_real_tensors_sum_to(world: World, case: Case) -> None:
    assert_planned(world, case)
