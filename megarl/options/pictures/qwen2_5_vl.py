"""Qwen2.5-VL: Qwen2's decoder, and a tower whose layers look through windows but for a few."""

from __future__ import annotations

from megarl.errors import ModelError
from megarl.models import qwen2
from megarl.models.architecture import HFConfig
from megarl.models.hf_fields import refuse, size
from megarl.models.vision import Vision
from megarl.options.pictures.qwen2_vl import TEXT, mrope, square_patch
from megarl.options.pictures.seeing_family import seeing
from megarl.options.pictures.vision_config import Shapes, blocks, linear, placeholders, vision_config

DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 4,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


def vision(hf_config: HFConfig) -> Vision:
    """The tower: RMSNorms, gated MLPs with biases, and a projector of two layers."""
    config = vision_config(hf_config, DEFAULTS)
    refuse(config, "hidden_act", "silu", "its multiply-adds and shapes are those of a gated SiLU MLP")
    hidden, ffn, out, depth = (size(config, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size", "depth"))
    patch = square_patch(config)
    window = size(config, "window_size") // (patch["patch"] * patch["merge"]) * patch["merge"]
    if not window:
        raise ModelError(f"config.json: window_size is {config['window_size']}; a window must have room for a token")
    wide = hidden * patch["merge"] ** 2

    def block(name: str) -> Shapes:
        return {
            f"{name}norm1.weight": (hidden,),
            f"{name}norm2.weight": (hidden,),
            **linear(f"{name}attn.qkv", 3 * hidden, hidden),
            **linear(f"{name}attn.proj", hidden, hidden),
            **linear(f"{name}mlp.gate_proj", ffn, hidden),
            **linear(f"{name}mlp.up_proj", ffn, hidden),
            **linear(f"{name}mlp.down_proj", hidden, ffn),
        }

    shapes = {
        "patch_embed.proj.weight": (hidden, patch["channels"], patch["temporal"], patch["patch"], patch["patch"]),
        **blocks(depth, block),
        "merger.ln_q.weight": (hidden,),
        **linear("merger.mlp.0", wide, wide),
        **linear("merger.mlp.2", out, wide),
    }
    return Vision(
        tower="Qwen2_5_VisionTransformerPretrainedModel",
        shapes=shapes,
        mrope=mrope(hf_config),
        hidden=hidden,
        out=out,
        depth=depth,
        heads=size(config, "num_heads"),
        ffn=ffn,
        activation="silu",
        deepstack=(),
        tokens_per_second=float(config["tokens_per_second"]),
        position_table=None,
        window=window,
        window_layers=depth - len(set(config["fullatt_block_indexes"]) & set(range(depth))),
        **patch,
        **placeholders(hf_config),
    )


ARCHITECTURE = seeing(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    qwen2.ARCHITECTURE,
    TEXT,
    vision,
    prefixes=("visual.", "model."),
    has_windows=True,
)
