"""A text family, made of what its decoder has of its own: the common part (`dense.py`) is read and filled in here once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megarl.models import dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.dense import DenseSizes
from megarl.models.hf_fields import with_defaults
from megarl.models.layer_ropes import LayerRope
from megarl.models.rope import rope_refusal
from megarl.models.weight_map import WeightMap
from megarl.models.windows import window_refusal

_NO_MODEL = "it has no model of this family, and would run transformers' own, whose weights it holds otherwise"
NOT_IN_SGLANG = SglangFacts(refusal=lambda hf_config: _NO_MODEL)


def plain_weight_map(hf_config: HFConfig, sizes: DenseSizes) -> WeightMap:
    """The common rules."""
    return dense.weight_map(sizes, dense.attention_rules(sizes), dense.mlp_rules(sizes))


def text_family(
    name: str,
    hf_classes: tuple[str, ...],
    transformer_config_kwargs: Callable[[HFConfig, DenseSizes], dict[str, Any]],
    weight_map: Callable[[HFConfig, DenseSizes], WeightMap] = plain_weight_map,
    gpt_kwargs: Callable[[HFConfig, DenseSizes], dict[str, Any]] = dense.gpt_kwargs,
    *,
    defaults: Mapping[str, Any] | None = None,
    text_config: Callable[[HFConfig], HFConfig] | None = None,
    sizes_of: Callable[[HFConfig], DenseSizes] = DenseSizes.from_hf,
    sglang: SglangFacts | None = None,
    refusal: Callable[[HFConfig], str | None] | None = None,
    serves_windows: bool = True,
    layer_rope: Callable[[HFConfig], LayerRope | None] = lambda hf_config: None,
    **more: Any,
) -> Architecture:
    """The architecture whose functions take a config with its defaults, and the decoder's sizes; `more` are its other fields.

    `defaults` are transformers' for fields that are missing or null; `text_config` does more than that. `refusal`: why SGLang
    cannot serve a model, before the common reasons; unless it `serves_windows`, that there are some is one of them.
    """
    if text_config is None:
        text_config = (lambda hf_config: with_defaults(hf_config, defaults)) if defaults else (lambda hf_config: hf_config)

    def given(hf_config: HFConfig) -> tuple[HFConfig, DenseSizes]:
        filled = text_config(hf_config)
        return filled, sizes_of(filled)

    def of_gpt(hf_config: HFConfig) -> dict[str, Any]:
        layer_rope(hf_config)  # which refuses what it cannot represent
        return gpt_kwargs(*given(hf_config))

    def refused(hf_config: HFConfig) -> str | None:
        reason = refusal(hf_config) if refusal is not None else None
        windows = None if reason or serves_windows else window_refusal(transformer_config_kwargs(*given(hf_config)))
        return reason or windows or rope_refusal(hf_config)

    facts = sglang or SglangFacts()
    return Architecture(
        name=name,
        hf_classes=hf_classes,
        transformer_config_kwargs=lambda hf_config: transformer_config_kwargs(*given(hf_config)),
        gpt_kwargs=of_gpt,
        weight_map=lambda hf_config: weight_map(*given(hf_config)),
        sglang=replace(facts, refusal=refused) if refusal is not None or not serves_windows else facts,
        text_config=text_config,
        layer_rope=layer_rope,
        **more,
    )
