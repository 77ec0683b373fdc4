"""OLMo 3: OLMo 2 with windows in three of four layers; the scaling of rotary frequencies is of the others alone."""

from __future__ import annotations

from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, olmo2
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse_biases, size, with_defaults
from megarl.models.layer_ropes import LayerRope, gpt_kwargs_of_full_layers, rope_of_windows, with_rope_of_full_layers
from megarl.models.windows import FULL, SLIDING, sliding_layers

DEFAULTS = {"rms_norm_eps": 1e-5}
"""transformers' default that differs from that of other families."""
WINDOW, PATTERN, THETA = 4096, 4, 500000.0


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing, and the rotary parameters of layers without a window."""
    return with_rope_of_full_layers(_filled(hf_config), full_theta=THETA)


def _filled(hf_config: HFConfig) -> HFConfig:
    found = with_defaults(hf_config, DEFAULTS)
    found["sliding_window"] = hf_config.get("sliding_window", WINDOW)
    if not found.get("layer_types"):
        layers = range(1, size(found, "num_hidden_layers") + 1)
        found["layer_types"] = [SLIDING if layer % PATTERN else FULL for layer in layers]
    return found


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder with `qk_layernorm` and windows.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    hf_config = text_config(hf_config)
    kwargs = dense.transformer_config_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config), sliding_layers(hf_config))
    return kwargs | {"qk_layernorm": True}


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying.

    Raises:
        ModelError: a rotary embedding cannot be represented.
    """
    layer_rope(hf_config)
    return gpt_kwargs_of_full_layers(text_config(hf_config))


def layer_rope(hf_config: HFConfig) -> LayerRope:
    """The layers with a window, however long it is.

    Raises:
        ModelError: their rotary embedding is scaled, or is not said where transformers 5 reads another base than SGLang.
    """
    hf_config = _filled(hf_config)
    theta = hf_config.get("rope_theta")
    if theta is not None and float(theta) != THETA and not hf_config.get("rope_parameters"):
        raise ModelError(
            f"config.json: rope_theta is {theta!r}, which transformers 5 takes for layers without a window alone; it must be "
            f"{THETA:g}, or rope_parameters must have the rope_theta of each kind of layer"
        )
    sizes, sliding = dense.DenseSizes.from_hf(hf_config), sliding_layers(hf_config) or frozenset()
    return rope_of_windows(hf_config, sliding, sizes.head_dim, theta_field=None, theta=THETA)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if hf_config.get("rope_parameters"):
        return (
            "its config.json must have rope_theta and rope_scaling, as published ones do: SGLang reads no rope_parameters here"
        )
    return olmo2.sglang_refusal(hf_config)


ARCHITECTURE = Architecture(
    name="olmo3",
    hf_classes=("Olmo3ForCausalLM", "Olmo3ForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=olmo2.weight_map,
    sglang=SglangFacts(refusal=_sglang_refusal, copies_kv_heads=False),
    text_config=text_config,
    traits=olmo2.traits,
    layer_rope=layer_rope,
)
