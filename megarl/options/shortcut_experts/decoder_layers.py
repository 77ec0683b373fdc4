"""LongCat-Flash's layers in the place of the `reference` layer spec's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.errors import LayoutError
from megarl.options.shortcut_experts.layer import ScaledLatentAttention, ShortcutLayer
from megarl.options.shortcut_experts.mixture import with_zero_experts
from megarl.options.shortcut_experts.sizes import ShortcutLayers


def placed(
    specs: Sequence[ModuleSpec], layers: Sequence[int], config: TransformerConfig, own: ShortcutLayers, layer_spec: str
) -> list[ModuleSpec]:
    """The specs of a chunk's `layers`, each with a second half.

    Raises:
        LayoutError: they are not those of the `reference` layer spec, or attention by segments.
    """
    if layer_spec != "reference":
        raise LayoutError(
            f"model.layer_spec is '{layer_spec}', but this model has layers of LongCat-Flash, which megarl computes on plain "
            "torch alone; it must be 'reference'"
        )
    dense = get_gpt_layer_local_spec(normalization=config.normalization).submodules.mlp
    return [_placed(spec, dense, own) for spec in specs]


def _placed(spec: ModuleSpec, dense: Any, own: ShortcutLayers) -> ModuleSpec:
    parts = spec.submodules
    attention = parts.self_attention
    scaled = replace(attention, module=ScaledLatentAttention, params={**attention.params, "own": own})
    first = replace(parts, self_attention=scaled, mlp=with_zero_experts(parts.mlp, own.zero_experts))
    second = ModuleSpec(module=TransformerLayer, submodules=replace(parts, self_attention=scaled, mlp=dense))
    return replace(spec, module=ShortcutLayer, submodules=first, params={**spec.params, "dense": dense, "second": second})


def finish(chunk: Any, own: ShortcutLayers) -> None:
    """Leave the chunk as it is: it has nothing beside its layers."""
