"""Qwen3-Omni's thinker, which hears and answers by text: an audio tower before Qwen3-MoE's decoder.

Sounds are placed as text is: each of their tokens goes one position on in time, height and width, so that a token has one
position. The thinker's vision tower is left out of training, and exported as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.errors import ModelError
from megarl.models import qwen3_moe
from megarl.models.architecture import HFConfig
from megarl.models.hf_fields import refuse, size, with_defaults
from megarl.models.rope import Rope
from megarl.options.pictures.hearing import CHUNK_FRAMES, CHUNK_TOKENS, CONVOLUTIONS, Hearing
from megarl.options.pictures.seeing_family import ROPE_KINDS, seeing
from megarl.options.pictures.vision_config import Shapes, TextConfig, layer_norm, linear

TEXT_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "norm_topk_prob": True, "decoder_sparse_step": 1}
OF_TEXT = TextConfig(TEXT_DEFAULTS, tied_in_text=False)
DEFAULTS = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
    "n_window": CHUNK_FRAMES // 2,
    "n_window_infer": 800,
    "output_dim": 3584,
    "downsample_hidden_size": 480,
}
KERNEL = (3, 3)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def text_config(hf_config: HFConfig) -> HFConfig:
    """Qwen3-MoE's config."""
    return OF_TEXT({name: value for name, value in hf_config.items() if name != "audio_config"})


def hearing(hf_config: HFConfig) -> Hearing:
    """The audio tower of a config.

    Raises:
        ModelError: it cuts sounds otherwise than transformers counts their tokens, or has sizes that contradict each other.
    """
    section = hf_config.get("audio_config")
    if section is not None and not isinstance(section, Mapping):
        raise ModelError(f"config.json: audio_config is {section!r}; it must be an object")
    config = with_defaults(dict(section or {}), DEFAULTS)
    refuse(config, "n_window", CHUNK_FRAMES // 2, "transformers counts 13 tokens in each chunk of 100 frames")
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        refuse(config, name, 0.0, "megarl trains the tower without")
    width, ffn, out, depth, mel_bins = (
        size(config, name) for name in ("d_model", "encoder_ffn_dim", "output_dim", "encoder_layers", "num_mel_bins")
    )
    heads, channels = size(config, "encoder_attention_heads"), size(config, "downsample_hidden_size")
    window = size(config, "n_window_infer")
    if width % heads or width % 2 or width < 4:
        raise ModelError(
            f"config.json: audio_config.d_model is {width}; it must be even, at least 4, and a multiple of {heads}"
        )
    if window % CHUNK_FRAMES:
        raise ModelError(f"config.json: audio_config.n_window_infer is {window}; it must be a multiple of {CHUNK_FRAMES}")
    token = size(hf_config, "audio_token_id", default=151646, least=0)
    return Hearing(
        tower="Qwen3OmniMoeAudioEncoder",
        section="audio_config",
        shapes=_shapes(width, ffn, out, depth, channels, mel_bins),
        mrope=None,
        patch=1,
        temporal=1,
        merge=1,
        channels=channels,
        hidden=width,
        out=out,
        depth=depth,
        heads=heads,
        ffn=ffn,
        activation=str(config["activation_function"]),
        deepstack=(),
        tokens_per_second=None,
        position_table=None,
        image_token=token,
        video_token=token,
        window=window // CHUNK_FRAMES * CHUNK_TOKENS,
        window_layers=depth,
        mel_bins=mel_bins,
    )


def _shapes(width: int, ffn: int, out: int, depth: int, channels: int, mel_bins: int) -> Shapes:
    into, shapes = 1, Shapes()
    for name in CONVOLUTIONS:
        shapes |= {f"{name}.weight": (channels, into, *KERNEL), f"{name}.bias": (channels,)}
        into, mel_bins = channels, -(-mel_bins // 2)
    shapes |= linear("conv_out", width, channels * mel_bins, bias=False)
    for number in range(depth):
        name = f"layers.{number}."
        for projection in PROJECTIONS:
            shapes |= linear(f"{name}self_attn.{projection}", width, width)
        shapes |= layer_norm(f"{name}self_attn_layer_norm", width) | layer_norm(f"{name}final_layer_norm", width)
        shapes |= linear(f"{name}fc1", ffn, width) | linear(f"{name}fc2", width, ffn)
    return shapes | layer_norm("ln_post", width) | linear("proj1", width, width) | linear("proj2", out, width)


def _gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    Rope.from_hf(text_config(hf_config), kinds=ROPE_KINDS)
    return OF_ALL.gpt_kwargs(hf_config)


OF_ALL = seeing(
    "qwen3_omni_moe_thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    qwen3_moe.ARCHITECTURE,
    text_config,
    hearing,
    prefixes=("audio_tower.", "model."),
)
ARCHITECTURE = replace(
    OF_ALL,
    gpt_kwargs=_gpt_kwargs,
    weight_map=lambda hf_config: replace(OF_ALL.weight_map(hf_config), left_out=("visual.",)),
    sglang=replace(
        OF_ALL.sglang,
        refusal=lambda hf_config: "it serves the thinker only within a folder of the whole model, with its talker",
    ),
    other_names=(),
)
