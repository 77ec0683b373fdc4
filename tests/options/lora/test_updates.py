"""Real training ranks push adapters: every rank of an engine is handed its boxes of A and B, and no weight travels.

The reference are the whole tensors that the ranks export, and the checkpoint that they loaded.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.layout import Layout
from megarl.options.lora.weight_map import Lora
from megarl.weights.checksums import digest
from megarl.weights.merged_pushes import merge
from tests.families import build_folder
from tests.weights.test_execution import Collecting, engine_layout, given, rank_of, together
from tests.world import World

LORA = Lora(rank=3, alpha=5.0)
ENGINES = 2


def push_twice(rank: int, world_size: int, folder: str, layout: Layout, lora: Lora, tps: list[int]) -> Any:
    """What this rank exports, and by size of the engines what it gives them first, what then, and what it reports."""
    from unittest import mock

    from megarl.megatron.weights import global_tensors
    from megarl.models.adapters import is_adapter
    from megarl.workers.rank import Rank

    mine = rank_of(rank, folder, layout, lora=lora, sends_adapters=True)
    policy = mine.roles["policy"]
    for name, tensor in global_tensors(policy.chunks):
        if is_adapter(name):
            rule = policy.weight_map.rule_for(name)
            place = layout.coords(rank).tp if rule.tp_axis is not None else 0
            drawn = torch.Generator().manual_seed(sum(map(ord, rule.megatron_name)) * 8 + place)
            with torch.no_grad():
                tensor.copy_(torch.randn(tensor.shape, generator=drawn))
    exported, found = dict(policy.export_adapters()), []
    for tp in tps:
        engines = {number: Collecting(engine_layout(folder, tp, lora=lora)) for number in range(ENGINES)}
        for engine in engines.values():
            engine.is_checked = True
        mine.parts, mine.pusher, mine.engines = [], None, set()
        reported: list[Any] = []
        push = Rank.push_weights

        def reporting(self: Any, *arguments: Any) -> Any:
            reported.append(push(self, *arguments))  # noqa: B023
            return reported[-1]  # noqa: B023

        bases: list[Any] = [dict.fromkeys(range(ENGINES)), dict.fromkeys(range(ENGINES), 1)]
        with mock.patch.object(Rank, "push_weights", reporting):
            handed = given(mine, engines, bases, planned=True)
        found.append((handed, reported))
    return exported, found


@pytest.mark.parametrize(
    ("family", "layout", "lora"),
    [
        ("llama", Layout(tp=2, pp=2), LORA),
        ("qwen2", Layout(tp=2, pp=2), Lora(3, 5.0, targets=("all-linear", "lm_head"))),
        ("qwen3", Layout(dp=2, pp=2), Lora(4, 8.0, targets=("q_proj", "v_proj", "down_proj"))),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=2), Lora(4, 8.0, targets=("*.self_attn.*",))),
    ],
)
def test_engines_are_handed_their_boxes_of_adapters_and_checksums_of_the_weights_beside_them(
    world: World, tmp_path: Path, family: str, layout: Layout, lora: Lora
) -> None:
    folder, tps = tmp_path / "model", [1, 2]
    build_folder(family, folder)
    answers = world.call(push_twice, str(folder), layout, lora, tps, size=layout.world_size)
    adapters = {name: values for exported, _ in answers for name, values in exported.items()}
    whole = load_file(folder / "model.safetensors")
    for number, tp in enumerate(tps):
        slices = engine_layout(str(folder), tp, lora=lora)
        for update, engine in product(range(2), range(ENGINES)):
            handed = [found[number][0][update] for _, found in answers]
            reported = merge([found[number][1][update] for _, found in answers])[engine]
            for rank in range(tp):
                values, counts = together(handed, engine, rank)
                assert values.keys() == adapters.keys() == slices.adapter_slices.keys()
                for name, tensor in values.items():
                    (held,) = (one for one in slices.adapter_slices[name] if one.engine_rank == rank)
                    expected = adapters[name][held.row : held.row + held.rows, held.col : held.col + held.cols]
                    assert torch.equal(tensor, expected), (name, rank)
                    assert bool((counts[name] == 1).all())
            held_bytes = sum(4 * one.rows * one.cols for of_name in slices.adapter_slices.values() for one in of_name)
            assert reported.nbytes == held_bytes < tp * sum(values.nbytes for values in adapters.values()) + 1
            checked = {held: value for held, value in reported.checksums.items() if held.tensor in whole}
            assert not slices.missing(reported.checksums, adapters_alone=update == 1)
            assert bool(checked) == (update == 0), "an engine that has the weights is not asked for them again"
            for box, value in checked.items():
                (held,) = (one for one in slices.slices[box.tensor] if one.engine_rank == box.engine_rank)
                matrix = whole[box.tensor].reshape(len(whole[box.tensor]), -1)
                row, col = held.row + box.row, held.col + box.col
                assert digest(matrix[row : row + box.rows, col : col + box.cols]) == value
