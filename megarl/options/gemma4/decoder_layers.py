"""Gemma 4's layers in the place of the `reference` layer spec's, and what a model chunk has beside them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.errors import LayoutError
from megarl.options.gemma4.attention import Gemma4Attention
from megarl.options.gemma4.inputs import LayerInputs
from megarl.options.gemma4.layer import Gemma4Layer
from megarl.options.gemma4.mixture import mixture_beside
from megarl.options.gemma4.sizes import Gemma4Layers


def placed(
    specs: Sequence[ModuleSpec], layers: Sequence[int], config: TransformerConfig, own: Gemma4Layers, layer_spec: str
) -> list[ModuleSpec]:
    """The specs of a chunk's `layers` (counted from 0 in the whole model) with what these have of their own.

    Raises:
        LayoutError: they are not those of the `reference` layer spec, or a layer's keys are in another chunk.
    """
    if layer_spec != "reference":
        raise LayoutError(
            f"model.layer_spec is '{layer_spec}', but this model has layers of Gemma 4, which megarl computes on plain torch "
            "alone; it must be 'reference'"
        )
    for layer in layers:
        if (source := own.followed.get(layer)) is not None and source < layers[0]:
            raise LayoutError(
                f"a model chunk begins with layer {layers[0]}, but layer {layer} reads what layer {source} computes"
            )
    kept: dict[int, Any] = {}
    return [_placed(spec, own, layer, kept) for spec, layer in zip(specs, layers, strict=True)]


def _placed(spec: ModuleSpec, own: Gemma4Layers, layer: int, kept: dict[int, Any]) -> ModuleSpec:
    kind, parts = own.kinds[layer], spec.submodules
    attention = parts.self_attention
    params = {**attention.params, "kind": kind, "kept": kept}
    parts = replace(parts, self_attention=replace(attention, module=Gemma4Attention, params=params))
    if own.mixture:
        parts = replace(parts, mlp=mixture_beside(parts.mlp), pre_mlp_layernorm=IdentityOp)
    params = {**spec.params, "kind": kind, "kept": kept, "inputs": own.inputs}
    return replace(spec, module=Gemma4Layer, submodules=parts, params=params)


def finish(chunk: Any, own: Gemma4Layers) -> None:
    """Give a chunk the inputs of its layers, if these have some, and leave recomputation to the layers.

    megatron-core would compute a layer anew without the keys that it takes from another, and without its inputs.
    """
    chunk.decoder.config = copy.copy(chunk.decoder.config)
    chunk.decoder.config.recompute_granularity = None
    if own.inputs and chunk.pre_process:
        inputs = LayerInputs(chunk.config, own, scatters=chunk.embedding.reduce_scatter_embeddings)
        chunk.embedding.layer_inputs = inputs
        chunk.embedding.register_forward_hook(inputs.compute, with_kwargs=True)
        for layer in chunk.decoder.layers:
            layer.read_input = partial(inputs.of_layer, layer.layer_number - 1)
