"""A model of the same architecture as another, and divisible by the same layouts, but small enough for a laptop. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from megarl.config.layout import Layout
from megarl.models.architecture import HFConfig

HEAD, HIDDEN, FFN = 16, 64, 32
"""Dimensions of a head, of the residual stream, and feed-forward columns of a rank (SGLang on a CPU pads others)."""


def shrunk_layout(layout: Layout) -> dict[str, Any]:
    """The fields of a layout for a model with one layer in each chunk."""
    fields = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "sequence_parallel")}
    ends = {name: layout.vpp or 1 for name in ("first_stage_layers", "last_stage_layers") if getattr(layout, name) is not None}
    return fields | ends


def shrunk_config(
    hf_config: HFConfig, layouts: Iterable[Layout], *, engine_ranks: int, engine_ep: int, vocab_size: int
) -> HFConfig:
    """`config.json` of the small model: heads and routing as they are, everything else as small as `layouts` and engines allow.

    Engines have `engine_ranks` ranks and share experts among `engine_ep` groups of these. FP8 blocks and further prediction
    layers are left out.
    """
    layouts = list(layouts)
    ffn = FFN * math.lcm(engine_ranks, *(layout.tp for layout in layouts))
    chunks = [layout.pp * (layout.vpp or 1) for layout in layouts]
    found = dict(hf_config) | {
        "hidden_size": HIDDEN,
        "intermediate_size": ffn,
        "num_hidden_layers": max(2, math.lcm(*chunks)),
        "vocab_size": vocab_size,
        "torch_dtype": "float32",
        "dtype": "float32",
        "initializer_range": 0.1,
    }
    for name in ("quantization_config", "auto_map", "bos_token_id", "pad_token_id", "eos_token_id"):
        found.pop(name, None)
    if "kv_lora_rank" in found:  # multi-head latent attention
        found |= {"kv_lora_rank": 32, "qk_nope_head_dim": HEAD, "qk_rope_head_dim": HEAD // 2, "v_head_dim": HEAD}
        found |= {"q_lora_rank": 32} if found.get("q_lora_rank") else {}
    elif found.get("head_dim"):
        found["head_dim"] = HEAD
    else:  # the family may know no other head than its share of the residual stream
        found["hidden_size"] = HEAD * int(found["num_attention_heads"])
    for name, least in (("first_k_dense_replace", 1), ("num_nextn_predict_layers", 0)):
        if name in found:
            found[name] = min(int(found[name]), least)
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if found.get(name):
            per_token, groups = int(found.get("num_experts_per_tok") or 1), int(found.get("n_group") or 1)
            unit = math.lcm(engine_ep, 2 * groups, *(layout.ep for layout in layouts))
            found[name] = min(int(found[name]), -(-2 * per_token // unit) * unit)
    if found.get("moe_intermediate_size"):
        found["moe_intermediate_size"] = FFN * math.lcm(engine_ranks, *(layout.etp for layout in layouts))
    return found
