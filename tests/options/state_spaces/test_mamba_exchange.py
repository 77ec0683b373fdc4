"""Context parallelism of Mamba-2 layers: a layer exchanges what plans count, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.layout import Layout
from megarl.data.stream import Response, Unit
from megarl.models.registry import load_hf_config
from megarl.models.shape import shape_of
from tests.families import build_folder
from tests.world import World


def exchanged_numbers(rank: int, world_size: int, folder: Path, cp: int) -> tuple[int, int]:
    """Numbers that this rank exchanges with its group, or gets of all of it, in a forward pass, and tokens that it holds."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward
    from megarl.options.state_spaces import layer

    layout = Layout(cp=cp)
    initialize_layout(layout, seed=1)
    role = RankModel(ModelOptions(str(folder), layout, layer_spec="reference"))
    counted: list[int] = []
    send, gather = torch.distributed.all_to_all_single, layer.all_tokens

    def sending(output: torch.Tensor, tensor: torch.Tensor, *args: object, **options: object) -> object:
        counted.append(tensor.numel())
        return send(output, tensor, *args, **options)

    def gathering(tokens: torch.Tensor, *args: object) -> torch.Tensor:
        whole = gather(tokens, *args)  # type: ignore[arg-type]
        counted.append(whole.numel())
        return whole

    torch.distributed.all_to_all_single, layer.all_tokens = sending, gathering
    try:
        forward(role.chunks, role.options, [units()])
    finally:
        torch.distributed.all_to_all_single, layer.all_tokens = send, gather
    return sum(counted), -(-sum(len(unit.prompt_ids) + len(unit.responses[0].token_ids) for unit in units()) // cp)


def units() -> list[Unit]:
    """Two sequences of 16 tokens, which no layout pads."""
    ids = torch.arange(16)
    return [Unit(ids[:7], [Response(index, ids[7:], torch.ones(9, dtype=torch.bool))]) for index in range(2)]


@pytest.mark.parametrize("family", ["granite_hybrid-dense", "nemotron_h-plain"])
def test_a_layer_exchanges_what_plans_count(world: World, tmp_path: Path, family: str) -> None:
    """The first has two groups, which two ranks share out and four get whole, the other one four."""
    build_folder(family, tmp_path / "model")
    linear = shape_of(load_hf_config(tmp_path / "model")).linear
    assert linear is not None
    for cp in (1, 2, 4):
        for numbers, tokens in world.call(exchanged_numbers, tmp_path / "model", cp, size=cp):
            assert numbers == (tokens * linear.exchanged(1, cp) * len(linear.layers) if cp > 1 else 0)
