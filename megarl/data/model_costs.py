"""Multiply-adds of a decoder's matrices, from a Hugging Face config: dense, with experts, with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def attention_products(config: Mapping[str, Any]) -> tuple[int, int]:
    """Multiply-adds of one layer's attention: (per token in its matrices, per pair of a token and one it attends to).

    Raises:
        KeyError: a size is missing.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if not config.get("kv_lora_rank"):
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return hidden * head_dim * 2 * (heads + kv_heads), 2 * heads * head_dim
    nope, rope, value, latent = (
        config[field] for field in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    queries, query_latent = heads * (nope + rope), config.get("q_lora_rank")
    of_queries = query_latent * (hidden + queries) if query_latent else hidden * queries
    of_keys_and_values = hidden * (latent + rope) + latent * heads * (nope + value)
    return of_queries + of_keys_and_values + heads * value * hidden, heads * (nope + rope + value)


def mlp_products(config: Mapping[str, Any]) -> int:
    """Multiply-adds per token of all layers' gated MLPs, and of the routers and experts that a token uses.

    Raises:
        KeyError: a size is missing.
    """
    hidden, layers, ffn = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    experts = next(
        (config[field] for field in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(field)), 0
    )
    if not experts:
        return layers * 3 * hidden * ffn
    with_experts = [
        layer
        for layer in range(config.get("first_k_dense_replace") or 0, layers)
        if (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0 and layer not in (config.get("mlp_only_layers") or ())
    ]
    used = config["num_experts_per_tok"] + (config.get("n_shared_experts") or 0)
    of_experts = hidden * experts + 3 * hidden * used * (config.get("moe_intermediate_size") or ffn)
    return len(with_experts) * of_experts + (layers - len(with_experts)) * 3 * hidden * ffn
