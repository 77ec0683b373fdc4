"""A model of the same architecture as another, and divisible by the same layouts, but small enough for a laptop. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any

from megarl.config.layout import Layout
from megarl.models.architecture import HFConfig

HEAD, HIDDEN, FFN = 16, 64, 32
"""Dimensions of a head, of the residual stream, and feed-forward columns of a rank (SGLang on a CPU pads others)."""
TOWER_HIDDEN = 64
"""Width of a vision tower."""

_AT_MOST = {
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "num_nextn_predict_layers": 0,
    "num_mtp_modules": 0,
}
"""Fields that say which layers have experts or predict, and what they are at most in the small model."""


def shrunk_layout(layout: Layout, layers: int = 1) -> dict[str, Any]:
    """The fields of a layout for a model with so many `layers` in each chunk."""
    fields = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "sequence_parallel")}
    ends = {
        name: layers * (layout.vpp or 1)
        for name in ("first_stage_layers", "last_stage_layers")
        if getattr(layout, name) is not None
    }
    return fields | ends


def shrunk_config(
    hf_config: HFConfig, layouts: Iterable[Layout], *, engine_ranks: int, engine_ep: int, vocab_size: int
) -> HFConfig:
    """`config.json` of the small model: heads and routing as they are, everything else as small as `layouts` and engines allow.

    Engines have `engine_ranks` ranks and share experts among `engine_ep` groups of these. FP8 blocks and further prediction
    layers are left out.
    """
    layouts = list(layouts)
    if "vision_config" in hf_config:
        sizes = {"engine_ranks": engine_ranks, "engine_ep": engine_ep, "vocab_size": vocab_size}
        return _shrunk_seeing(hf_config, layouts, **sizes)
    ffn = FFN * math.lcm(engine_ranks, *(layout.tp for layout in layouts))
    chunks = [layout.pp * (layout.vpp or 1) for layout in layouts]
    small = dict(hf_config) | {
        "hidden_size": HIDDEN,
        "intermediate_size": ffn,
        "num_hidden_layers": max(2, math.lcm(*chunks)),
        "vocab_size": vocab_size,
        "torch_dtype": "float32",
        "dtype": "float32",
        "initializer_range": 0.1,
    }
    for name in ("quantization_config", "auto_map", "bos_token_id", "pad_token_id", "eos_token_id"):
        small.pop(name, None)
    if "kv_lora_rank" in small:  # multi-head latent attention
        small |= {"kv_lora_rank": 32, "qk_nope_head_dim": HEAD, "qk_rope_head_dim": HEAD // 2, "v_head_dim": HEAD}
        small |= {"q_lora_rank": 32} if small.get("q_lora_rank") else {}
        if isinstance(small.get("rope_parameters"), dict):  # which may say the share of a head that rotates
            small["rope_parameters"] = {k: v for k, v in small["rope_parameters"].items() if k != "partial_rotary_factor"}
    elif small.get("head_dim"):
        if small.get("rotary_dim"):
            small["rotary_dim"] = HEAD * int(small["rotary_dim"]) // int(small["head_dim"])
        small |= {name: HEAD for name in ("head_dim", "attention_head_dim") if small.get(name)}
        if HIDDEN % int(small["num_attention_heads"]):  # families refuse widths that their heads do not divide
            small["hidden_size"] = HEAD * int(small["num_attention_heads"])
    else:  # the family may know no other head than its share of the residual stream
        small["hidden_size"] = HEAD * int(small["num_attention_heads"])
    for name, least in _AT_MOST.items():
        if name in small:
            small[name] = min(int(small[name]), least)
    for name in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        if small.get(name):
            per_token, groups = _per_token(small), int(small.get("n_group") or 1)
            unit = math.lcm(engine_ep, 2 * groups, *(layout.ep for layout in layouts))
            small[name] = min(int(small[name]), -(-2 * per_token // unit) * unit)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if small.get(name):
            small[name] = list(islice(cycle(small[name]), small["num_hidden_layers"]))
    if small.get("hybrid_override_pattern"):  # Nemotron-H: a letter for each layer
        small["hybrid_override_pattern"] = "".join(islice(cycle(small["hybrid_override_pattern"]), small["num_hidden_layers"]))
        widths = {"mamba_head_dim": HEAD // 2, "ssm_state_size": HEAD, "moe_latent_size": HIDDEN // 2}
        widths["moe_shared_expert_intermediate_size"] = ffn
        small |= {name: width for name, width in widths.items() if small.get(name)}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(small.get(name), dict) and "short_factor" in small[name]:  # one for each pair of dimensions that rotates
            pairs = int(HEAD * float(small[name].get("partial_rotary_factor", small.get("partial_rotary_factor")) or 1)) // 2
            factors = {of: list(islice(cycle(small[name][of]), pairs)) for of in ("short_factor", "long_factor")}
            small[name] = {**small[name], **factors}
    if isinstance(small.get("moe_intermediate_size"), list):  # each layer's, which is that of the MLP
        small["moe_intermediate_size"] = ffn
    elif small.get("moe_intermediate_size"):
        small["moe_intermediate_size"] = FFN * math.lcm(engine_ranks, *(layout.etp for layout in layouts))
    return small


def _per_token(hf_config: HFConfig) -> int:
    """Experts that a token uses, by any name of the field."""
    given = next((hf_config[name] for name in ("num_experts_per_tok", "moe_k", "moe_topk") if hf_config.get(name)), 1)
    return max(given) if isinstance(given, list) else int(given)


def chunk_layers(hf_config: HFConfig) -> int:
    """Layers of a chunk in the small model: as many as there are behind which a tower adds features, at least one."""
    vision = hf_config.get("vision_config") or {}
    return max(1, len(vision.get("deepstack_visual_indexes", ())))


def _shrunk_seeing(hf_config: HFConfig, layouts: list[Layout], **sizes: int) -> HFConfig:
    """The decoder is shrunk as a text model is; the tower has two layers then, or one for each feature that it adds."""
    nested = hf_config.get("text_config")
    text = {name: value for name, value in (hf_config if nested is None else nested).items() if name != "vision_config"}
    small, added = shrunk_config(text, layouts, **sizes), chunk_layers(hf_config)
    small["num_hidden_layers"] *= added
    head = int(small.get("head_dim") or HEAD)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(small.get(name), dict) and "kv_lora_rank" not in small:  # whose tokens have one position
            share = small[name].get("partial_rotary_factor", small.get("partial_rotary_factor")) or 1
            pairs = int(head * share) // 2  # of a head's dimensions, by three positions
            small[name] = {**small[name], "mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}
    tower = dict(hf_config["vision_config"])
    tower |= {"depth": max(2, added), "num_heads": TOWER_HIDDEN // HEAD, "intermediate_size": 2 * TOWER_HIDDEN}
    if "merge_kernel_size" in tower:  # whose config may say the id of pictures twice
        kept = {name: value for name, value in hf_config.items() if name != "media_placeholder_token_id"}
        return {**kept, "text_config": small, "vision_config": _shrunk_kimi(tower), "projection_hidden_size": TOWER_HIDDEN}
    tower |= {"fullatt_block_indexes": [1]} if "fullatt_block_indexes" in tower else {}
    tower |= {"deepstack_visual_indexes": [*range(added)]} if "deepstack_visual_indexes" in tower else {}
    # Qwen2-VL calls the tower's width otherwise, and by this name that of the features.
    widths = {"hidden_size": TOWER_HIDDEN, "out_hidden_size": small["hidden_size"]}
    if "embed_dim" in tower:
        widths = {"embed_dim": TOWER_HIDDEN, "hidden_size": small["hidden_size"]}
    vision_fields = {"vision_config": tower | widths}
    if "audio_config" in hf_config:
        vision_fields["audio_config"] = _shrunk_audio(hf_config["audio_config"], small["hidden_size"])
    return {**small, **vision_fields} if nested is None else {**hf_config, "text_config": small, **vision_fields}


def _shrunk_audio(tower: HFConfig, out: int) -> HFConfig:
    sizes = {"encoder_layers": 2, "encoder_attention_heads": TOWER_HIDDEN // HEAD, "encoder_ffn_dim": 2 * TOWER_HIDDEN}
    return tower | sizes | {"d_model": TOWER_HIDDEN, "downsample_hidden_size": 8, "output_dim": out}


def _shrunk_kimi(tower: HFConfig) -> HFConfig:
    """Kimi-K2.5's tower, whose fields have other names; those of the hub, which only repeat them, are left out."""
    left_out = ("depth", "num_heads", "mm_hidden_size", "text_hidden_size")
    kept = {name: value for name, value in tower.items() if name not in left_out and not name.startswith("vt_")}
    return kept | {"num_hidden_layers": 2, "num_attention_heads": TOWER_HIDDEN // HEAD, "hidden_size": TOWER_HIDDEN}
