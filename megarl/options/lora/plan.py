"""Activations that low-rank adapters add to the activations of a rank, and spare there: layers that are not trained keep
no inputs.

As megarl's adapters compute (`options/lora/layers.py`): each keeps its layer's input, what A makes of it, and, beside
layers that
Megatron holds in one parameter, B with zeros between its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.config.layout import Layout
from megarl.models.adapters import is_adapter
from megarl.models.shape import ModelShape
from megarl.models.weight_map import Rule
from megarl.options.lora.weight_map import OUTPUT_LAYER, linear_rules
from megarl.planning.activations import Precision
from megarl.planning.roles import PlannedRole

ATTENTION, MLP = "self_attention", "mlp"


def rules_of_layer(shape: ModelShape, layer: int) -> tuple[Rule, ...]:
    """The rules of A and B beside a layer's weights."""
    rules = (rule for rule in shape.weight_map.rules if is_adapter(rule.megatron_name) and not _is_of_output(rule))
    return tuple(rule for rule in rules if rule.has_layer(layer))


def kept_of_layer(shape: ModelShape, layer: int, layout: Layout, precision: Precision) -> Mapping[str, float]:
    """Bytes per token of this rank's stream that adapters add to attention and to MLP, less what is not kept there."""
    added = {ATTENTION: 0.0, MLP: 0.0}
    adapters = {rule.megatron_name.rsplit("_lora.", 1)[0]: rule for rule in rules_of_layer(shape, layer) if _is_a(rule)}
    for rule in linear_rules(shape.weight_map):
        if not rule.has_layer(layer):
            continue
        name = rule.megatron_name.removesuffix(".weight")
        adapter = adapters.get(name)
        block = ATTENTION if ".self_attention." in name else MLP
        added[block] += (
            _of_adapter(shape, rule, adapter, layout, precision) if adapter else -_spared(shape, rule, layout, precision)
        )
    if precision.is_reference:
        is_read = any("shared_experts.linear_fc1" in name for name in adapters)
        if layer in shape.expert_layers and not is_read:  # the router's input
            added[MLP] -= _rows(layout) * shape.hidden * precision.itemsize
    return added


def kept_behind_layers(role: PlannedRole, stage: int, precision: Precision) -> float:
    """Bytes per token of this rank's stream that an adapter of the output layer keeps: its input, and what A makes of it."""
    shape, layout = role.shape, role.layout
    rank = sum(rule.packing.hf_shapes[0][0] for rule in shape.weight_map.rules if _is_of_output(rule) and _is_a(rule))
    if not rank or role.value_head or role.trained is None or stage < layout.pp - 1:
        return 0.0
    return (_rows(layout) * shape.hidden + rank) * precision.itemsize


def spread_bytes(shape: ModelShape, layer: int, layout: Layout, itemsize: int) -> float:
    """Bytes of the Bs with zeros between their rows that a micro-batch's backward pass of a layer needs."""
    total = 0.0
    rules = rules_of_layer(shape, layer)
    layers_of = {rule.megatron_name[:-1]: len(rule.hf_names) for rule in rules if _is_a(rule)}
    for rule in rules:
        if not _is_a(rule) and (layers := layers_of[rule.megatron_name[:-1]]) > 1:
            split = (layout.etp if rule.is_expert else layout.tp) if rule.packing.tp_axis == 0 else 1
            here = shape.experts // layout.ep if rule.is_expert else 1
            total += here * layers * sum(map(math.prod, rule.packing.hf_shapes)) / split * itemsize
    return total


def _of_adapter(shape: ModelShape, weight: Rule, a: Rule, layout: Layout, precision: Precision) -> float:
    tokens, inputs = _tokens_and_inputs(shape, weight, layout)
    rank = sum(shape_of_a[0] for shape_of_a in a.packing.hf_shapes)
    gathered = weight.packing.tp_axis == 0 and not weight.is_expert
    again = tokens * inputs * precision.itemsize if precision.fp8 else 0.0  # the product keeps its input in a byte
    return (1.0 if gathered else tokens if weight.is_expert else _rows(layout)) * rank * precision.itemsize + again


def _spared(shape: ModelShape, weight: Rule, layout: Layout, precision: Precision) -> float:
    """The input of a layer without an adapter, where it is known that nothing else keeps it."""
    layer_name = weight.megatron_name.removesuffix(".weight").rsplit(".", 1)[-1]
    of_attention = layer_name == "linear_proj" and (precision.is_reference or precision.fp8)
    if layer_name not in ("linear_qkv", "linear_fc1", "linear_fc2") and not of_attention:
        return 0.0
    if layer_name == "linear_fc1" and "shared_experts" in weight.megatron_name:
        return 0.0
    tokens, inputs = _tokens_and_inputs(shape, weight, layout)
    return tokens * inputs * precision.operand


def _tokens_and_inputs(shape: ModelShape, weight: Rule, layout: Layout) -> tuple[float, float]:
    """Rows and width for a token of the stream: how many rows of the layer's input this rank has, and how wide they are."""
    split, columns = weight.packing.tp_axis == 1, weight.packing.hf_shapes[0][1]
    if weight.is_expert:
        return _rows(layout) * shape.top_k * layout.etp, columns / (layout.etp if split else 1)
    return (1.0, columns / layout.tp) if split else (_rows(layout), float(columns))


def _rows(layout: Layout) -> float:
    return 1 / layout.tp if layout.sequence_parallel else 1.0


def _is_a(rule: Rule) -> bool:
    return rule.megatron_name.endswith("A")


def _is_of_output(rule: Rule) -> bool:
    return is_adapter(rule.megatron_name) and rule.megatron_name.startswith(OUTPUT_LAYER)
