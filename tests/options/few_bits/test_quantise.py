"""FP8 computed shard by shard is bit for bit FP8 computed on the whole tensor, wherever the borders of shards lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.models.packings import Copy, GateUp, GroupedQKV, Packing
from megarl.models.weight_map import BoundRule
from megarl.models.weight_tensors import hf_from_shards, shard_from_hf
from megarl.options.few_bits.fp8_blocks import dequantise_rows, quantise_rows
from megarl.options.few_bits.quantise import quantise_shard, scales_of

LAYERS: dict[str, tuple[Packing, tuple[str, ...]]] = {
    "row-parallel, borders on blocks": (Copy((256, 1024), 1), ("down.weight",)),
    "row-parallel, borders inside blocks": (Copy((200, 4 * 90), 1), ("down.weight",)),
    "gate and up, borders inside blocks": (GateUp(4 * 72, 300), ("gate.weight", "up.weight")),
    "gate and up, borders on blocks": (GateUp(512, 256), ("gate.weight", "up.weight")),
    "q, k and v of 8 and 4 heads": (GroupedQKV(8, 4, 48, 130), ("q.weight", "k.weight", "v.weight")),
    "fewer kv heads than ranks": (GroupedQKV(8, 2, 40, 64), ("q.weight", "k.weight", "v.weight")),
    "not split": (Copy((130, 257)), ("latent.weight",)),
}


def of_ranks(rule: BoundRule, shards: list[Tensor], kind: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What every rank gets. The exchange is done in two passes: first everybody's maxima are heard, then each is told."""
    heard: list[Tensor] = []
    for rank, shard in enumerate(shards):
        quantise_shard(rule, shard, rank, len(shards), lambda values: heard.append(values.clone()), kind)  # type: ignore[arg-type]

    def tell(values: Tensor) -> None:
        values.copy_(torch.stack(heard).amax(0))

    return [quantise_shard(rule, shard, rank, len(shards), tell, kind) for rank, shard in enumerate(shards)]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_shards_are_quantised_to_the_bits_of_the_whole_tensor(layer: str, tp: int, dtype: torch.dtype) -> None:
    packing, names = LAYERS[layer]
    rule = BoundRule("decoder.layers.0.linear.weight", names, packing)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[1])).to(dtype)
        for name, shape in rule.hf_shapes.items()
    }
    weights[names[0]][:128, :128] = 0
    shards = [shard_from_hf(rule, weights.__getitem__, rank, tp) for rank in range(tp)]
    answers = of_ranks(rule, shards, "float")
    whole = dict(hf_from_shards(rule, [values for values, _ in answers]))
    for name, weight in weights.items():
        values, scales = quantise_rows(weight)
        assert torch.equal(whole[name].view(torch.uint8), values.view(torch.uint8)), name
        for _, of_rank in answers:
            assert torch.equal(of_rank[f"{name}_scale_inv"], scales), name


def test_scales_that_are_powers_of_two_are_the_next_above_and_keep_more_than_half_of_the_range() -> None:
    largest = torch.tensor([[448.0, 448.0001, 1e-6, 0.0, 3.0, 896.0]])
    floats, powers = scales_of(largest, "float"), scales_of(largest, "power_of_two")
    assert powers.tolist() == [[2.0 ** torch.tensor(scale).log2().ceil().item() for scale in floats[0].tolist()]]
    assert powers[0, 0] == 1.0  # a scale that is one already stays
    assert bool(((powers >= floats) & (powers < 2 * floats)).all())


def test_with_powers_of_two_values_come_back_within_a_float8s_rounding() -> None:
    """A float8 has three bits after the point; a power of two as scale adds no rounding of its own."""
    rule = BoundRule("decoder.layers.0.linear.weight", ("w.weight",), Copy((300, 260), 1))
    weight = torch.randn(300, 260, generator=torch.Generator().manual_seed(1)).bfloat16()
    answers = of_ranks(
        rule, [shard_from_hf(rule, {"w.weight": weight}.__getitem__, rank, 2) for rank in range(2)], "power_of_two"
    )
    (_, values), scales = hf_from_shards(rule, [values for values, _ in answers])[0], answers[0][1]["w.weight_scale_inv"]
    back = dequantise_rows(values, scales, 0)
    difference = (back - weight.float()).abs()
    assert bool((difference <= weight.float().abs() * 2**-4 + scales.max() * 2**-10).all())
