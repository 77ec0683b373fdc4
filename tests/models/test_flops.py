"""The operations behind `policy/tflops_per_gpu` and `policy/mfu` are those that torch counts in Hugging Face models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.data.shares import Share
from megarl.data.stream import ScorePosition
from megarl.models.flops import FlopsModel, picture_flops
from megarl.models.shape import shape_of
from megarl.models.update_flops import update_flops
from megarl.observe.rank_record import RankRecord, UpdateFlops
from megarl.options.pictures.media import Media
from megarl.planning.gpus import gpu_called, gpu_named
from megarl.runs.timeline import throughput
from tests import seeing

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=80),
    "qwen3": transformers.Qwen3Config(**SIZES, intermediate_size=80, head_dim=32),
    "mixtral": transformers.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, intermediate_size=80, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        **SIZES, head_dim=24, intermediate_size=80, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3,
    ),
}  # fmt: skip


def counted(config: Any, tokens: int) -> int:
    """What torch counts in a forward and a backward pass over one sequence with an output row for each token."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.arange(tokens)[None] % config.vocab_size
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def responses(count: int, prompt: int, response: int, scored: int) -> Share:
    """A micro-batch of one prompt with `count` responses to it, all of these lengths."""
    mask = [1] * scored + [0] * (response - scored)
    batch = Batch([Sample("", "", "", [0] * prompt, [0] * response, mask, [], [], "stop")] * count)
    units = batch.unit_rows(range(count), share_prefix=True)
    (share,) = batch.shares(units, [[[(0, tuple(range(count)))]]], [])
    return share


def ours(flops: FlopsModel, *shares: Share, **how: bool) -> int:
    how = {"shared_prompts": True, "position": ScorePosition.NEXT, "logits": True} | how
    return update_flops(flops, shares, **how).total


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_of_the_hugging_face_model(name: str) -> None:
    config = MODELS[name]
    flops = FlopsModel.of(shape_of(config.to_dict()))
    for tokens in (16, 40):
        # a row for every token that is fed: a prompt of 1, and a response of one token more, whose last is not fed
        found = ours(flops, responses(1, 1, tokens, tokens))
        hidden_by_the_mask = 3 * flops.per_pair * (tokens * tokens - tokens * (tokens + 1) // 2)
        assert found + hidden_by_the_mask == counted(config, tokens)


def test_pairs_within_a_window_are_counted_one_by_one() -> None:
    config = transformers.Qwen2Config(
        **SIZES, intermediate_size=80, use_sliding_window=True, sliding_window=7, max_window_layers=1
    )
    flops, whole = FlopsModel.of(shape_of(config.to_dict())), FlopsModel.of(shape_of(MODELS["llama"].to_dict()))
    of_layer = whole.per_pair // 3

    def pairs(first: int, last: int, window: int) -> int:
        return sum(1 for query in range(first, last) for key in range(query + 1) if key > query - window)

    assert (flops.per_pair, flops.per_window_pair, flops.window) == (of_layer, 2 * of_layer, 7)
    for prompt, response in ((3, 2), (5, 9), (12, 20), (7, 1)):
        wanted = of_layer * sum(pairs(0, prompt + response, window) for window in (99, 7, 7))
        matrices = flops.per_token * (prompt + response) + flops.per_logit_row * response
        assert flops.cost(prompt, [response]) == matrices + wanted
        both = of_layer * sum(pairs(prompt, prompt + response, window) for window in (99, 7, 7))
        assert flops.cost(prompt, [response] * 2) - flops.cost(prompt, [response]) == both + matrices - prompt * flops.per_token
        fed = responses(1, prompt, response + 1, response)
        assert ours(flops, fed) == 3 * flops.cost(prompt, [response])


def test_only_what_is_fed_and_scored_counts() -> None:
    flops = FlopsModel(per_token=1000, per_logit_row=100, per_pair=1)
    pairs = 5 * 6 // 2 + 3 * 5 + 3 * 4 // 2
    assert ours(flops, responses(1, 5, 4, 2)) == 3 * (1000 * 8 + 100 * 2 + pairs)
    assert ours(flops, responses(1, 5, 4, 2), logits=False) == 3 * (1000 * 8 + pairs)
    with_last = 5 * 6 // 2 + 4 * 5 + 4 * 5 // 2
    assert ours(flops, responses(1, 5, 4, 1), position=ScorePosition.AT, logits=False) == 3 * (1000 * 9 + with_last)
    one, pair = responses(1, 5, 4, 2), responses(2, 5, 4, 2)
    assert ours(flops, pair, shared_prompts=False) == 2 * ours(flops, one) == ours(flops, one, one)
    assert 2 * ours(flops, one) - ours(flops, pair) == 3 * (1000 * 5 + 5 * 6 // 2)
    assert ours(flops, responses(1, 5, 0, 0)) == ours(flops, responses(1, 5, 1, 0))  # nothing of it is fed


def test_pictures_count_once_for_each_micro_batch_that_shows_them() -> None:
    shape = shape_of(seeing.hf_config("qwen2_5_vl").to_dict())
    assert shape.vision is not None
    flops = FlopsModel.of(shape)
    wide, high = (Media("image", (name,), grid, 1, 6) for name, grid in (("wide", (1, 4, 6)), ("high", (1, 8, 4))))
    again = replace(wide, place=9)

    def shares(*media: list[Media]) -> list[Share]:
        samples = [
            Sample("", str(group), "", [0] * 20, [0] * 4, [1] * 4, [], [], "stop", media=shown)
            for group, shown in enumerate(media)
        ]
        batch = Batch(samples)
        units = batch.unit_rows(range(len(samples)), share_prefix=True)
        grids = [size.grids_of([0]) for size in units.sizes]
        assert grids == [tuple(one.grid for one in shown) for shown in media]
        assert [len(size.grids) for size in units.sizes] == [sum(one.place < 20 for one in shown) for shown in media]
        return batch.shares(units, [[[(unit, (0,)) for unit in range(len(samples))]]], [])

    of_wide, of_high = (picture_flops(shape.vision, one.grid) for one in (wide, high))
    without = ours(flops, *shares([], []))
    assert ours(flops, *shares([wide], [again])) == without + 3 * of_wide  # computed once
    assert ours(flops, *shares([wide], [high, again])) == without + 3 * (of_wide + of_high)
    how = {"shared_prompts": True, "position": ScorePosition.NEXT, "logits": True}
    assert update_flops(flops, shares([wide], [high]), **how, tower_passes=1) == UpdateFlops(without, of_wide + of_high, 46, 46)
    told = replace(high, place=21)  # of a response
    assert ours(flops, *shares([wide], [told])) == ours(flops, *shares([wide], [high]))
    assert ours(flops, *shares([high], [told])) == without + 3 * of_high
    assert ours(flops, *shares([], [told])) == without + 3 * of_high
    assert flops.cost(20, [4], [wide.grid, high.grid]) == flops.cost(20, [4]) + of_wide + of_high


def test_the_longest_rank_gives_the_time_and_a_known_gpu_the_share() -> None:
    spans = [[("update", 0.0, 1.0), ("forward", 1.0, 9.0), ("update", 9.0, 10.0)], [("update", 0.0, 4.0)]]
    ranks = [RankRecord(of_rank, 0, seconds) for of_rank, seconds in zip(spans, (0.25, 0.5), strict=True)]
    assert throughput(UpdateFlops(8 * 10**12), ranks, None) == {"policy/tflops_per_gpu": 1.0}
    found = throughput(UpdateFlops(6 * 10**14, 2 * 10**14), ranks, gpu_named("h200").peak_flops())
    assert found == {
        "policy/tflops_per_gpu": 100.0,
        "policy/mfu": pytest.approx(100 / 989),
        "policy/tower_flops_share": 0.25,
        "policy/tower_forward_s": 0.5,
    }
    idle = [RankRecord([("forward", 0.0, 1.0)], 0)]
    assert throughput(UpdateFlops(), ranks, None) == throughput(UpdateFlops(1), idle, None) == {}


def test_a_gpu_is_known_by_what_cuda_calls_it_alone() -> None:
    assert gpu_called("NVIDIA H200") == gpu_named("h200")
    assert gpu_called("NVIDIA H100 80GB HBM3") == gpu_named("h100")
    assert gpu_called("NVIDIA H200 NVL") is gpu_called("NVIDIA H100 PCIe") is gpu_called(None) is None
