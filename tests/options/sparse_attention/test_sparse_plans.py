"""Operations and caches of models whose tokens attend to chosen keys, as plans count them."""

from __future__ import annotations

from pathlib import Path

import transformers

from megarl.models.flops import FlopsModel
from megarl.models.shape import shape_of
from megarl.options.sparse_attention.times import stated
from megarl.planning.gpus import gpu_named
from megarl.planning.plan import lengths_of, make_plan
from tests.config.smallest import config

ROOT = Path(__file__).parents[3]


def test_operations_are_those_of_every_key_that_is_scored_and_of_every_one_that_is_chosen() -> None:
    hidden, heads, q_rank, kv_rank, nope, rope, value, layers = 6, 4, 5, 3, 7, 2, 8, 3
    index_heads, index_dim, top_k = 9, 10, 4
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    sizes |= {"intermediate_size": 11, "moe_intermediate_size": 3, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"q_lora_rank": q_rank, "kv_lora_rank": kv_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope}
    sizes |= {"v_head_dim": value, "vocab_size": 13, "first_k_dense_replace": 1}
    indexer = {"index_n_heads": index_heads, "index_head_dim": index_dim, "index_topk": top_k}
    config = transformers.GlmMoeDsaConfig(**sizes, **indexer, indexer_types=["full", "shared", "full"]).to_dict()
    shape, flops = shape_of(config), FlopsModel.of(shape_of(config))
    plain = FlopsModel.of(shape_of(transformers.DeepseekV3Config(**sizes, n_group=1, topk_group=1).to_dict()))
    prompt, response = 7, 3
    expected = plain.per_token * (prompt + response) + plain.per_logit_row * response
    for position in range(prompt + response):
        seen = position + 1
        expected += layers * 2 * heads * min(seen, top_k) * (nope + rope + value)
        of_indexer = q_rank * index_heads * index_dim + hidden * index_dim + hidden * index_heads
        expected += 2 * 2 * (of_indexer + seen * (index_heads * index_dim + index_heads))
    assert flops.cost(prompt, [response]) == expected
    assert shape.attended(100) == top_k
    assert shape.cached == kv_rank + rope + index_dim * 2 // 3


def test_a_long_context_of_deepseek_v32_is_counted_by_the_keys_that_are_chosen() -> None:
    """2,048 of 131,072 keys: attention is a 64th of all, beside the indexer's scores of all keys."""
    flops = FlopsModel.of(shape_of(transformers.DeepseekV32Config().to_dict()))
    dense = FlopsModel.of(shape_of(transformers.DeepseekV3Config(num_hidden_layers=61).to_dict()))
    last = flops.attention(131_071, 1)
    of_indexer = 2 * 61 * (64 * 128 + 64) * 131_072
    assert last - of_indexer == dense.attention(131_071, 1) // 64


def test_a_plan_says_what_chosen_keys_take_in_main_memory() -> None:
    """DeepSeek-V3.2: a bit for each of 8,192 tokens in 61 layers, for 512 responses of 1,000 tokens behind prompts of 500."""
    overrides = ["rollout.engine=embedded", "rollout.prompts_per_step=64", "rollout.samples_per_prompt=8"]
    overrides += [
        "rollout.max_new_tokens=7168",
        "data.max_prompt_tokens=1024",
        "policy.layout={tp: 8, sequence_parallel: true}",
    ]
    overrides += [f"model.path={ROOT / 'examples/models/deepseek-v3.2'}", "model.layer_spec=reference"]

    def lines(*more: str) -> list[str]:
        run = config(*overrides, *more)
        return stated(make_plan(run, gpu_named("h100"), lengths=lengths_of(run, prompt=500, response=1000)))

    [line] = lines("policy.indexer.replay=engine")
    assert line.startswith("Chosen keys take 62.5 kB of a token, a bit for each of 8,192 in 61 layers: 48 GB of a step")
    assert lines() == []
