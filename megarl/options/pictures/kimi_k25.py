"""Kimi-K2.5: DeepSeek-V3's decoder, whose tokens have one position each, and a tower with a projector of its own."""

from __future__ import annotations

import re
from dataclasses import replace

from megarl.errors import ModelError
from megarl.models import deepseek_v3
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import refuse, size
from megarl.models.vision import Vision
from megarl.options.pictures.seeing_family import seeing
from megarl.options.pictures.vision_config import Shapes, TextConfig, layer_norm, linear, placeholders, vision_config

DECODER_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
}
DEFAULTS = {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "merge_kernel_size": (2, 2),
    "in_channels": 3,
}
CHANNELS = 3
"""Colours of transformers' patches, whatever the config says."""
HUB_FIELDS = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "mm_hidden_size": "hidden_size",
}
"""What the hub's config calls fields of the tower, of which transformers reads its own names alone."""
ONLY = {
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "video_attn_type": "spatial_temporal",
}
"""Fields of the hub's config that transformers does not read, with the only values that it computes."""
TAPS = 16
"""Rows of the table of positions that make up a patch's one: bicubic."""
POSITION_BYTES = TAPS * (8 + 2) + 2 * 8
"""Each an int64 with a bfloat16 weight; where they begin, and how many they are."""
NAMES = (
    (r"^model\.vision_tower\.layers\.(\d+)\.norm1\.", r"vision_tower.encoder.blocks.\1.norm0."),
    (r"^model\.vision_tower\.layers\.(\d+)\.norm2\.", r"vision_tower.encoder.blocks.\1.norm1."),
    (r"^model\.vision_tower\.layers\.(\d+)\.mlp\.fc1\.", r"vision_tower.encoder.blocks.\1.mlp.fc0."),
    (r"^model\.vision_tower\.layers\.(\d+)\.mlp\.fc2\.", r"vision_tower.encoder.blocks.\1.mlp.fc1."),
    (r"^model\.vision_tower\.layers\.(\d+)\.attn\.proj\.", r"vision_tower.encoder.blocks.\1.wo."),
    (r"^model\.vision_tower\.layers\.(\d+)\.attn\.wqkv\.", r"vision_tower.encoder.blocks.\1.wqkv."),
    (r"^model\.vision_tower\.final_layernorm\.", "vision_tower.encoder.final_layernorm."),
    (r"^model\.vision_tower\.patch_embed\.pos_emb\.position_embeddings$", "vision_tower.patch_embed.pos_emb.weight"),
    (r"^model\.vision_tower\.", "vision_tower."),
    (r"^model\.mm_projector\.in_proj\.", "mm_projector.proj.0."),
    (r"^model\.mm_projector\.out_proj\.", "mm_projector.proj.2."),
    (r"^model\.mm_projector\.", "mm_projector."),
)
"""Patterns of transformers' names of the tower and the projector, and the hub's names; the first that fits counts."""
OTHER_NAMES = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
    ("model.mm_projector.pre_norm.", "mm_projector.pre_norm."),
)
"""Beginnings of names in transformers' module, and of those that transformers 5.19 saves otherwise than the hub has them."""
TEXT = TextConfig(DECODER_DEFAULTS, tied_in_text=False)


def text_config(hf_config: HFConfig) -> HFConfig:
    """DeepSeek-V3's config.

    Raises:
        ModelError: the decoder is of another family.
    """
    config = TEXT({"tie_word_embeddings": True} | hf_config | {"text_config": hf_config.get("text_config") or {}})
    if config.get("model_type") != "kimi_k2":
        refuse(config, "model_type", "deepseek_v3", "megarl knows no other decoder of this family")
    return config


def hub_name(name: str) -> str:
    """The hub's name of a tensor of transformers' module, its attention's in one matrix."""
    for pattern, on_the_hub in NAMES:
        renamed, count = re.subn(pattern, on_the_hub, name)
        if count:
            return renamed
    return name


def vision(hf_config: HFConfig) -> Vision:
    """The tower: LayerNorms, MLPs of two layers, learnt positions of a square; a projector of a norm and two layers.

    Raises:
        ModelError: a field says what transformers does not compute.
    """
    config = _tower_config(hf_config)
    hidden, ffn, depth, heads = (
        size(config, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    if hidden % (4 * heads):
        raise ModelError(
            f"config.json: num_attention_heads is {heads}; it must divide hidden_size = {hidden} into heads of a multiple of 4"
        )
    patch, side, merge = size(config, "patch_size"), size(config, "pos_emb_height"), _merge(config)
    wide, out = hidden * merge**2, size(text_config(hf_config), "hidden_size")

    def block(name: str) -> Shapes:
        return {
            **layer_norm(f"{name}norm1", hidden),
            **layer_norm(f"{name}norm2", hidden),
            **linear(f"{name}attn.proj", hidden, hidden),
            **linear(f"{name}attn.wqkv", 3 * hidden, hidden),
            **linear(f"{name}mlp.fc1", ffn, hidden),
            **linear(f"{name}mlp.fc2", hidden, ffn),
        }

    shapes: Shapes = {
        "patch_embed.proj.weight": (hidden, CHANNELS, patch, patch),
        "patch_embed.proj.bias": (hidden,),
        "patch_embed.pos_emb.position_embeddings": (side, side, hidden),
        **{name: shape for number in range(depth) for name, shape in block(f"layers.{number}.").items()},
        **layer_norm("final_layernorm", hidden),
        **layer_norm("merger.pre_norm", hidden),
        **linear("merger.in_proj", wide, wide),
        **linear("merger.out_proj", out, wide),
    }
    return Vision(
        tower="Kimi_K25VisionModel",
        shapes=shapes,
        mrope=None,
        patch=patch,
        temporal=1,
        merge=merge,
        channels=CHANNELS,
        hidden=hidden,
        out=out,
        depth=depth,
        heads=heads,
        ffn=ffn,
        activation=str(config["hidden_act"]),
        deepstack=(),
        tokens_per_second=None,
        position_table="patch_embed.pos_emb.position_embeddings",
        position_bytes=POSITION_BYTES,
        projector="Kimi_K25MultimodalProjection",
        qkv="wqkv",
        **placeholders(hf_config, 163605, 163840),
    )


def _tower_config(hf_config: HFConfig) -> HFConfig:
    config = vision_config(hf_config, DEFAULTS)
    for field, name in HUB_FIELDS.items():
        refuse(config, field, config[name], f"transformers reads {name} alone")
    for field, value in (*ONLY.items(), ("in_channels", CHANNELS)):
        refuse(config, field, value, "transformers computes nothing else")
    refuse(config, "pos_emb_width", config["pos_emb_height"], "transformers looks positions up in a square")
    refuse(hf_config, "projection_hidden_size", config["hidden_size"], "the projector's norm is over a patch's features")
    refuse(config, "projector_ln_eps", hf_config.get("projection_layer_norm_eps", 1e-5), "transformers has this epsilon")
    image = placeholders(hf_config, 163605, 163840)["image_token"]
    refuse(hf_config, "media_placeholder_token_id", image, "transformers reads image_token_id alone")
    if hf_config.get("projection_hidden_size") is None and config["hidden_size"] != DEFAULTS["hidden_size"]:
        refuse(config, "hidden_size", DEFAULTS["hidden_size"], "projection_hidden_size has this default")
    return config


def _merge(config: HFConfig) -> int:
    kernel = config["merge_kernel_size"]
    if not isinstance(kernel, (list, tuple)) or len(kernel) != 2 or kernel[0] != kernel[1]:
        raise ModelError(f"config.json: merge_kernel_size is {kernel!r}; it must be two equal numbers")
    return size({"merge_kernel_size": kernel[0]}, "merge_kernel_size")


OF_ALL = seeing(
    "kimi_k25",
    "Kimi_K25ForConditionalGeneration",
    deepseek_v3.ARCHITECTURE,
    text_config,
    vision,
    prefixes=("", "language_model.model."),
    tower_name=lambda tensor: hub_name(
        f"model.mm_projector.{tensor.removeprefix('merger.')}"
        if tensor.startswith("merger.")
        else f"model.vision_tower.{tensor}"
    ),
    output="language_model.lm_head.",
)
_NO_PROCESSOR = "it takes pictures by the code in the model's folder, which megarl does not run"
ARCHITECTURE = replace(
    OF_ALL,
    hf_classes=(*OF_ALL.hf_classes, "KimiK25ForConditionalGeneration", "KimiK25ForSequenceClassification"),
    other_names=OTHER_NAMES,
    hub_name=hub_name,
    sglang=SglangFacts(refusal=lambda hf_config: _NO_PROCESSOR),
)
