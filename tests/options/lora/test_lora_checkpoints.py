"""A checkpoint of adapters, written under one layout and read under another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.layout import Layout
from tests.megatron.test_checkpoint_layouts import Move, assert_moves
from tests.options.lora.adapters import LORA
from tests.world import World

WITH_OUTPUT = replace(LORA, targets=("all-linear", "lm_head"))
MOVES = {
    "with the output layer, tp2+sp to pp2": Move("llama", Layout(tp=2, sequence_parallel=True), Layout(pp=2), lora=WITH_OUTPUT),
    "with a tied output layer, pp2 to tp4": Move("llama-tied", Layout(pp=2), Layout(tp=4), lora=WITH_OUTPUT),
    "adapters, tp2 to pp2": Move("phi3", Layout(tp=2), Layout(pp=2), lora=LORA),
    "adapters, dp2 to tp2+sp": Move("qwen3_5", Layout(dp=2), Layout(tp=2, sequence_parallel=True), lora=LORA),
    "adapters, ep2·tp2+sp to pp2": Move(
        "qwen3_moe", Layout(tp=2, dp=2, ep=2, sequence_parallel=True), Layout(pp=2), "bfloat16", LORA
    ),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_another_layout_gives_the_same_adapters_moments_and_next_update(world: World, move: Move, tmp_path: Path) -> None:
    assert_moves(world, move, tmp_path)
