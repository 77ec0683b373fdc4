"""Qwen3-VL: Qwen3's decoder, and a tower that also adds features behind the decoder's first layers (deepstack)."""

from __future__ import annotations

from collections.abc import Callable

from megarl.errors import ModelError
from megarl.models import qwen3
from megarl.models.architecture import HFConfig
from megarl.models.hf_fields import size
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

TEXT = TextConfig({"rms_norm_eps": 1e-6, "rope_theta": 5e5}, tied_in_text=False)
DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
POSITION_BYTES = 4 * (8 + 4)
"""The four nearest positions, each an int64 with a float32 weight."""


def vision_with(tower: str, head_dim: Callable[[HFConfig], int]) -> Callable[[HFConfig], Vision]:
    """What reads a config; `tower` is the class's name, `head_dim` that of the decoder, here and in Qwen3-VL-MoE."""

    def vision(hf_config: HFConfig) -> Vision:
        config = vision_config(hf_config, DEFAULTS)
        hidden, ffn, out, depth = (
            size(config, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size", "depth")
        )
        patch, deepstack = square_patch(config), tuple(config["deepstack_visual_indexes"])
        if sorted({layer for layer in deepstack if layer in range(depth)}) != list(deepstack):
            raise ModelError(
                f"config.json: deepstack_visual_indexes is {list(deepstack)}; it must be some of the tower's "
                f"{depth} layers, in their order"
            )
        wide = hidden * patch["merge"] ** 2

        def block(name: str) -> Shapes:
            return {
                **layer_norm(f"{name}norm1", hidden),
                **layer_norm(f"{name}norm2", hidden),
                **linear(f"{name}attn.qkv", 3 * hidden, hidden),
                **linear(f"{name}attn.proj", hidden, hidden),
                **linear(f"{name}mlp.linear_fc1", ffn, hidden),
                **linear(f"{name}mlp.linear_fc2", hidden, ffn),
            }

        def merger(name: str, norm: int) -> Shapes:
            layers = {**linear(f"{name}linear_fc1", wide, wide), **linear(f"{name}linear_fc2", out, wide)}
            return {**layer_norm(f"{name}norm", norm), **layers}

        shapes: Shapes = {
            "patch_embed.proj.weight": (hidden, patch["channels"], patch["temporal"], patch["patch"], patch["patch"]),
            "patch_embed.proj.bias": (hidden,),
            "pos_embed.weight": (size(config, "num_position_embeddings"), hidden),
            **blocks(depth, block),
        }
        for number in range(len(deepstack)):
            shapes |= merger(f"deepstack_merger_list.{number}.", wide)
        shapes |= merger("merger.", hidden)
        return Vision(
            tower=tower,
            shapes=shapes,
            mrope=_mrope(hf_config, head_dim(hf_config)),
            hidden=hidden,
            out=out,
            depth=depth,
            heads=size(config, "num_heads"),
            ffn=ffn,
            activation=str(config["hidden_act"]),
            deepstack=deepstack,
            tokens_per_second=None,
            position_table="pos_embed.weight",
            position_bytes=POSITION_BYTES,
            **patch,
            **placeholders(hf_config),
        )

    return vision


def _mrope(hf_config: HFConfig, head_dim: int) -> Mrope:
    return mrope_of(hf_config, default=(24, 20, 20), interleaved=True, head_dim=head_dim)


def _head_dim(hf_config: HFConfig) -> int:
    return int(qwen3.ARCHITECTURE.transformer_config_kwargs(TEXT(hf_config))["kv_channels"])


ARCHITECTURE = seeing(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    qwen3.ARCHITECTURE,
    TEXT,
    vision_with("Qwen3VLVisionModel", _head_dim),
    prefixes=("model.visual.", "model.language_model."),
)
