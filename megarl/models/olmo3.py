"""OLMo 3: OLMo 2 with windows in three of four layers; the scaling of rotary frequencies is of the others alone."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, olmo2
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import refuse_biases
from megarl.models.layer_ropes import LayerRope, gpt_kwargs_of_full_layers, rope_of_windows, with_rope_of_full_layers
from megarl.models.text_family import text_family
from megarl.models.windows import sliding_layers, with_windows

DEFAULTS = {"rms_norm_eps": 1e-5}
"""transformers' default that differs from that of other families."""
WINDOW, PATTERN, THETA = 4096, 4, 500000.0


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing, and the rotary parameters of layers without a window."""
    return with_rope_of_full_layers(with_windows(hf_config, DEFAULTS, WINDOW, PATTERN), full_theta=THETA)


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm` and windows.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    return dense.transformer_config_kwargs(hf_config, sizes, sliding_layers(hf_config)) | {"qk_layernorm": True}


def layer_rope(hf_config: HFConfig) -> LayerRope:
    """The layers with a window, however long it is.

    Raises:
        ModelError: their rotary embedding is scaled, or is not said where transformers 5 reads another base than SGLang.
    """
    hf_config = with_windows(hf_config, DEFAULTS, WINDOW, PATTERN)
    theta = hf_config.get("rope_theta")
    if theta is not None and float(theta) != THETA and not hf_config.get("rope_parameters"):
        raise ModelError(
            f"config.json: rope_theta is {theta!r}, which transformers 5 takes for layers without a window alone; it must be "
            f"{THETA:g}, or rope_parameters must have the rope_theta of each kind of layer"
        )
    return rope_of_windows(hf_config, theta_field=None, theta=THETA)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if hf_config.get("rope_parameters"):
        return (
            "its config.json must have rope_theta and rope_scaling, as published ones do: SGLang reads no rope_parameters here"
        )
    return olmo2.sglang_refusal(hf_config)


ARCHITECTURE = text_family(
    "olmo3",
    ("Olmo3ForCausalLM", "Olmo3ForSequenceClassification"),
    transformer_config_kwargs,
    olmo2.weight_map,
    gpt_kwargs_of_full_layers,
    text_config=text_config,
    sglang=SglangFacts(copies_kv_heads=False),
    refusal=_sglang_refusal,
    traits=olmo2.traits,
    layer_rope=layer_rope,
)
