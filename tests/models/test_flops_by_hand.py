"""Operations that follow from a model's sizes are those of every multiplication written out."""

from __future__ import annotations

from typing import Any

import transformers

from megarl.models.flops import FlopsModel
from megarl.models.shape import shape_of
from tests.models.test_flops import ours, responses

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
}


def flops_of(family: str, **sizes: Any) -> FlopsModel:
    """Of a model of `family` with these sizes; whatever else it needs is transformers' default."""
    return FlopsModel.of(shape_of(CONFIGS[family](**{"num_key_value_heads": sizes["num_attention_heads"], **sizes}).to_dict()))


def test_flops_are_those_of_every_multiplication_written_out() -> None:
    hidden, layers, heads, kv_heads, head_dim, ffn, vocab = 8, 3, 4, 2, 6, 7, 11
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    flops = flops_of("llama", **sizes, head_dim=head_dim, intermediate_size=ffn, vocab_size=vocab)
    prompt, responses = 4, (3, 0, 2)
    matrices = [(hidden, heads * head_dim), (heads * head_dim, hidden)]
    matrices += [(hidden, kv_heads * head_dim)] * 2 + [(hidden, ffn)] * 2 + [(ffn, hidden)]
    expected = 0
    for tokens, first in [(prompt, 0), *((length, prompt) for length in responses)]:
        for position in range(tokens):
            seen = first + position + 1
            expected += layers * sum(2 * rows * columns for rows, columns in matrices)
            expected += layers * heads * seen * head_dim * 2 * 2  # scores, and the weighted sum of values
            expected += 2 * hidden * vocab if first else 0
    assert flops.cost(prompt, responses) == expected


def test_flops_of_experts_and_latent_attention_are_those_of_every_matrix_a_token_meets() -> None:
    """Each layer's matrices written out: a dense one, then experts (two of five and a shared one) behind latent attention."""
    hidden, heads, q_rank, kv_rank, nope, rope, value, ffn, vocab = 6, 4, 5, 3, 7, 2, 8, 9, 11
    latent = {"kv_lora_rank": kv_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    experts = {"n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    sizes = {"hidden_size": hidden, "num_hidden_layers": 3, "num_attention_heads": heads, "intermediate_size": ffn}
    sizes |= {"num_key_value_heads": heads, "n_group": 1, "topk_group": 1}
    config = {**sizes, **latent, **experts, "moe_intermediate_size": 4, "q_lora_rank": q_rank, "vocab_size": vocab}
    attention = [(hidden, q_rank), (q_rank, heads * (nope + rope)), (hidden, kv_rank + rope)]
    attention += [(kv_rank, heads * (nope + value)), (heads * value, hidden)]
    dense, moe = [(hidden, ffn)] * 3, [(hidden, 5)] + [(hidden, 4)] * 3 * (2 + 1)
    matrices = attention * 3 + dense + moe * 2
    flops = flops_of("deepseek_v3", **config)
    assert flops.per_token == sum(2 * rows * columns for rows, columns in matrices)
    assert flops.per_pair == 3 * heads * 2 * (nope + rope + value)
    assert flops.per_logit_row == 2 * hidden * vocab
    plain_queries = flops_of("deepseek_v3", **config | {"q_lora_rank": None})
    without = 3 * 2 * (hidden * heads * (nope + rope) - q_rank * (hidden + heads * (nope + rope)))
    assert plain_queries.per_token - flops.per_token == without


def test_flops_count_the_layers_that_have_experts() -> None:
    sizes = {"hidden_size": 6, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 100, "vocab_size": 11}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    dense = flops_of("llama", **sizes).per_token
    one_less = 2 * (6 * 8 + 3 * 6 * 2 * 10 - 3 * 6 * 100)
    for change, layers in (({}, 4), ({"decoder_sparse_step": 2}, 2), ({"mlp_only_layers": [0, 3]}, 2)):
        assert flops_of("qwen3_moe", **sizes, **experts, **change).per_token == dense + layers * one_less


def test_flops_of_a_layer_for_multi_token_prediction_are_those_of_its_matrices_over_a_token_less() -> None:
    hidden, heads, kv_rank, nope, rope, value, vocab = 6, 4, 3, 7, 2, 8, 11
    sizes = {"hidden_size": hidden, "num_hidden_layers": 3, "num_attention_heads": heads, "intermediate_size": 9}
    sizes |= {"num_key_value_heads": heads, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 4, "vocab_size": vocab}
    sizes |= {"n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    latent = {"kv_lora_rank": kv_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    config = transformers.DeepseekV3Config(**sizes, **latent, q_lora_rank=None).to_dict() | {"num_nextn_predict_layers": 1}
    plain, flops = FlopsModel.of(shape_of(config)), FlopsModel.of(shape_of(config).with_prediction)
    assert plain.prediction is None
    assert flops.prediction is not None
    matrices = [(hidden, heads * (nope + rope)), (hidden, kv_rank + rope), (kv_rank, heads * (nope + value))]
    matrices += [(heads * value, hidden), (hidden, 5), *[(hidden, 4)] * 3 * (2 + 1), (2 * hidden, hidden)]
    per_token, per_pair = sum(2 * rows * columns for rows, columns in matrices), heads * 2 * (nope + rope + value)
    assert (flops.prediction.per_token, flops.prediction.per_pair) == (per_token, per_pair)
    prompt, response, scored = 5, 4, 3
    tokens = prompt - 1 + response - 1
    wanted = per_token * tokens + per_pair * tokens * (tokens + 1) // 2 + 2 * hidden * vocab * scored
    share = responses(1, prompt, response, scored)
    assert ours(flops, share) - ours(plain, share) == 3 * wanted
