"""The roles of a run that compute the tokens that sequences begin with alike once, and with which attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarl.config import AnyConfig
from megarl.models.flops import FlopsModel, sharing_pays
from megarl.models.shape import ModelShape
from megarl.options.pictures.plan_pictures import MEAN_SHARE

FP8_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")
"""Fields of megatron-core's whose attention is Transformer Engine's alone."""


def shares_prefixes(config: AnyConfig, layer_spec: str, flops: FlopsModel) -> bool:
    """`policy.share_prefix`; `auto`: where it pays for prompts and responses of half the lengths that the config allows."""
    wanted = config.policy.share_prefix
    if wanted != "auto":
        return wanted
    if layer_spec == "reference":  # its attention is the same with and without
        return True
    group = config.sampling.samples_per_prompt if config.sampling is not None else 1
    prompt, response = (int(MEAN_SHARE * length) for length in config.longest_parts)
    return sharing_pays(flops, prompt, response, group)


def core_attention(
    layer_spec: str, folder: str, platform: str, dtype: str, megatron: Mapping[str, Any]
) -> Literal["spec", "segments"]:
    """The attention of a role that shares prefixes; `spec` under other layers than `reference`: it cannot.

    torch's flash attention takes 16-bit types, and megatron-core's latent attention counts positions itself.
    """
    if layer_spec == "reference" or ModelShape.read(folder).latent is not None:
        return "spec"
    if platform == "cuda" and dtype == "float32":
        return "spec"
    return "spec" if any(megatron.get(field) for field in FP8_ATTENTION) else "segments"
