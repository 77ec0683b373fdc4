"""Qwen2-VL: Qwen2's decoder, and a tower of full attention."""

from __future__ import annotations

from typing import Any

from megarl.models import qwen2
from megarl.models.architecture import HFConfig
from megarl.models.dense import DenseSizes
from megarl.models.hf_fields import size
from megarl.models.vision import Mrope, Vision
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

TEXT = TextConfig({"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}, tied_in_text=True)
DEFAULTS = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "hidden_act": "quick_gelu",
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def mrope(hf_config: HFConfig) -> Mrope:
    """One block of a head's dimensions for each axis, here and in Qwen2.5-VL."""
    head_dim = DenseSizes.from_hf(TEXT(hf_config)).head_dim
    return mrope_of(hf_config, default=(16, 24, 24), interleaved=False, head_dim=head_dim)


def square_patch(config: HFConfig) -> dict[str, Any]:
    """Sizes of patches, read from `vision_config`."""
    fields = {
        "patch": "patch_size",
        "temporal": "temporal_patch_size",
        "merge": "spatial_merge_size",
        "channels": "in_channels",
    }
    return {name: size(config, field) for name, field in fields.items()}


def vision(hf_config: HFConfig) -> Vision:
    """The tower: LayerNorms, MLPs of two layers, and a projector of two more."""
    config = vision_config(hf_config, DEFAULTS)
    hidden, out, depth = (size(config, name) for name in ("embed_dim", "hidden_size", "depth"))
    ffn, patch = hidden * size(config, "mlp_ratio"), square_patch(config)
    wide = hidden * patch["merge"] ** 2

    def block(name: str) -> Shapes:
        return {
            **layer_norm(f"{name}norm1", hidden),
            **layer_norm(f"{name}norm2", hidden),
            **linear(f"{name}attn.qkv", 3 * hidden, hidden),
            **linear(f"{name}attn.proj", hidden, hidden),
            **linear(f"{name}mlp.fc1", ffn, hidden),
            **linear(f"{name}mlp.fc2", hidden, ffn),
        }

    shapes = {
        "patch_embed.proj.weight": (hidden, patch["channels"], patch["temporal"], patch["patch"], patch["patch"]),
        **blocks(depth, block),
        **layer_norm("merger.ln_q", hidden),
        **linear("merger.mlp.0", wide, wide),
        **linear("merger.mlp.2", out, wide),
    }
    return Vision(
        tower="Qwen2VisionTransformerPretrainedModel",
        shapes=shapes,
        mrope=mrope(hf_config),
        hidden=hidden,
        out=out,
        depth=depth,
        heads=size(config, "num_heads"),
        ffn=ffn,
        activation=str(config["hidden_act"]),
        deepstack=(),
        tokens_per_second=None,
        position_table=None,
        **patch,
        **placeholders(hf_config),
    )


ARCHITECTURE = seeing(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    qwen2.ARCHITECTURE,
    TEXT,
    vision,
    prefixes=("visual.", "model."),
    has_windows=True,
)
