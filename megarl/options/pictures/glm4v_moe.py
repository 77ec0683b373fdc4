"""GLM-4.5V and GLM-4.6V: GLM-4.5's decoder, and a tower that joins patches by a convolution."""

from __future__ import annotations

from dataclasses import replace

from megarl.models import glm4_moe
from megarl.models.architecture import HFConfig
from megarl.models.dense import DenseSizes
from megarl.models.hf_fields import refuse, size
from megarl.models.rope import Rope
from megarl.models.vision import Mrope, Vision
from megarl.options.pictures.qwen2_vl import square_patch
from megarl.options.pictures.seeing_family import seeing
from megarl.options.pictures.vision_config import (
    Shapes,
    TextConfig,
    blocks,
    layer_norm,
    linear,
    mrope_of,
    placeholders,
    vision_config,
)

TEXT = TextConfig({**glm4_moe.DEFAULTS, "attention_bias": True}, tied_in_text=True)
DEFAULTS = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}
POSITION_BYTES = 2 * 4
"""Height and width as float32: `grid_sample` interpolates."""
ROPE_BASE = 10000.0
"""Base of the tower's angles in SGLang (0.5.23: models/glm4v.py), whatever the config says."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """GLM-4.5's config.

    Raises:
        ModelError: queries and keys have norms, which transformers does not compute in this family.
    """
    config = TEXT(hf_config)
    refuse(config, "use_qk_norm", False, "transformers has no norms of queries and keys in this family")
    return config


def vision(hf_config: HFConfig) -> Vision:
    """The tower: RMSNorms, gated MLPs as wide as the features, and a projector of a convolution and a gated MLP."""
    config = vision_config(hf_config, DEFAULTS)
    refuse(config, "hidden_act", "silu", "its multiply-adds and shapes are those of a gated SiLU MLP")
    hidden, ffn, out, depth = (size(config, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size", "depth"))
    patch, side = square_patch(config), size(config, "image_size") // size(config, "patch_size")

    def gated(name: str, width: int, into: int) -> Shapes:
        return {
            **linear(f"{name}gate_proj", width, into, bias=False),
            **linear(f"{name}up_proj", width, into, bias=False),
            **linear(f"{name}down_proj", into, width, bias=False),
        }

    def block(name: str) -> Shapes:
        return {
            f"{name}norm1.weight": (hidden,),
            f"{name}norm2.weight": (hidden,),
            **linear(f"{name}attn.qkv", 3 * hidden, hidden, bias=bool(config["attention_bias"])),
            **linear(f"{name}attn.proj", hidden, hidden, bias=False),
            **gated(f"{name}mlp.", out, hidden),
        }

    shapes = {
        "embeddings.position_embedding.weight": (side**2, hidden),
        "patch_embed.proj.weight": (hidden, patch["channels"], patch["temporal"], patch["patch"], patch["patch"]),
        "patch_embed.proj.bias": (hidden,),
        **blocks(depth, block),
        **linear("merger.proj", out, out, bias=False),
        **layer_norm("merger.post_projection_norm", out),
        **gated("merger.", ffn, out),
        "post_conv_layernorm.weight": (hidden,),
        "downsample.weight": (out, hidden, patch["merge"], patch["merge"]),
        "downsample.bias": (out,),
        "post_layernorm.weight": (hidden,),
    }
    return Vision(
        tower="Glm4vMoeVisionModel",
        shapes=shapes,
        mrope=_mrope(hf_config),
        hidden=hidden,
        out=out,
        depth=depth,
        heads=size(config, "num_heads"),
        ffn=out,
        activation="silu",
        deepstack=(),
        tokens_per_second=None,
        position_table="embeddings.position_embedding.weight",
        position_bytes=POSITION_BYTES,
        embedding_norms=1,
        projector_ffn=ffn,
        **patch,
        **placeholders(hf_config, 151363, 151364),
    )


def _mrope(hf_config: HFConfig) -> Mrope:
    text = text_config(hf_config)
    rotated = Rope.from_hf(text).rotated(DenseSizes.from_hf(text).head_dim)
    return mrope_of(hf_config, default=(8, 12, 12), interleaved=False, head_dim=rotated)


def _tower_heads(hf_config: HFConfig) -> int:
    return size(vision_config(hf_config, DEFAULTS), "num_heads")


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    rope = vision_config(hf_config, DEFAULTS).get("rope_parameters") or {}
    if rope.get("rope_theta", ROPE_BASE) != ROPE_BASE:
        return f"its tower rotates by the base {ROPE_BASE:g}, whatever vision_config.rope_parameters says"
    return OF_ALL.sglang.refusal(hf_config)


OF_ALL = seeing(
    "glm4v_moe",
    "Glm4vMoeForConditionalGeneration",
    glm4_moe.ARCHITECTURE,
    text_config,
    vision,
    prefixes=("model.visual.", "model.language_model."),
)
ARCHITECTURE = replace(OF_ALL, sglang=replace(OF_ALL.sglang, refusal=_sglang_refusal, padded_heads=_tower_heads))
