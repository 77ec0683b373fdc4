"""What each rank of an engine is sent is what the reshard plan says it holds, for every family that SGLang serves here."""

from __future__ import annotations

import pytest
import torch

from megarl.reshard.slices import engine_slices
from megarl.reshard.targets import EVERY_RANK, Target
from megarl.reshard.tensors import TensorTable
from megarl.rollout.checksums import EngineLayout, held_slices
from tests.reshard.layouts import hf_config, weight_map


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_a_rank_is_sent_the_box_of_each_tensor_that_the_plan_names(family: str, tp: int) -> None:
    config, rules = hf_config(family), weight_map(family)
    tensors = TensorTable.of(rules, 4)
    planned = engine_slices(tensors, Target(tp=tp, whole="experts"), rules.num_experts)
    boxes = {
        (tensors.names[tensor], to): (row, rows, col, cols)
        for tensor, rank, row, rows, col, cols in zip(
            *(getattr(planned, column).tolist() for column in ("tensor", "engine_rank", "row", "rows", "col", "cols")),
            strict=True,
        )
        for to in (range(tp) if rank == EVERY_RANK else [rank])
    }
    layout = EngineLayout(
        kv_heads=config["num_key_value_heads"], tied_embeddings=config["tie_word_embeddings"], dtype=torch.float32, tp=tp
    )
    for name, shape in rules.hf_shapes().items():
        weight = torch.arange(torch.Size(shape).numel()).view(shape)
        for rank, part in enumerate(held_slices(name, weight, layout)):
            if not part.numel():  # only padding of the vocabulary: nothing is planned
                assert (name, rank) not in boxes
                continue
            row, rows, col, cols = boxes.pop((name, rank))
            whole = weight if weight.ndim == 2 else weight[:, None]
            assert torch.equal(part.reshape(rows, cols), whole[row : row + rows, col : col + cols]), (name, rank)
    assert boxes == {}
