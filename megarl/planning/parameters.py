"""Parameters on each rank of a layout, exactly, from the weight map: the rules that also load and save them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache

from megarl.config.layout import Layout
from megarl.models.adapters import is_adapter
from megarl.models.packings import padded_vocab
from megarl.models.parameter_patterns import ParameterPatterns
from megarl.models.shape import ModelShape
from megarl.models.vision import TOWER
from megarl.models.weight_map import BoundRule, Rule


@dataclass(frozen=True)
class ParameterCounts:
    """What every rank of a pipeline stage holds. `dense` and `expert` are elements, whose optimizer state dp * cp and
    `Layout.edp` ranks share out.

    `frozen_dense` and `frozen_expert` are those of them that are not trained, `tower` the dense ones that are the vision
    tower's, of which `frozen_tower` are not trained. `products` are those that are operands of the layers' matrix products,
    which FP8 may hold in a byte. `dense_matrices` and `expert_matrices` are the elements of the layers' matrices that are
    trained. `value_head` is in float32, as are the `buffers`, which are not trained. `adapters` are those of both kinds that
    belong to low-rank adapters, beside which all else but the value head is frozen.
    """

    dense: int
    expert: int
    products: int
    value_head: int
    buffers: int
    frozen_dense: int = 0
    frozen_expert: int = 0
    tower: int = 0
    frozen_tower: int = 0
    dense_matrices: int = 0
    expert_matrices: int = 0
    adapters: int = 0

    @property
    def trained_dense(self) -> int:
        """Dense elements with a gradient."""
        return self.dense - self.frozen_dense

    @property
    def trained_expert(self) -> int:
        """Elements of experts with a gradient."""
        return self.expert - self.frozen_expert

    @property
    def trained(self) -> int:
        """Elements with a gradient."""
        return self.trained_dense + self.trained_expert + self.value_head


NOTHING_HELD = ParameterCounts(dense=0, expert=0, products=0, value_head=0, buffers=0)
"""Parameters of a role that computes with weights of another."""


@cache
def stage_parameters(
    shape: ModelShape, layout: Layout, *, value_head: bool = False, freeze: tuple[str, ...] = ()
) -> tuple[ParameterCounts, ...]:
    """The parameters of a rank of each pipeline stage; the ranks of a stage hold equally many.

    `freeze`: parts and patterns of what is not trained.

    Raises:
        LayoutError: the layout does not divide the model.
    """
    weight_map = shape.weight_map.without_output() if value_head else shape.weight_map
    elements = {rule: _elements(rule, layout, shape) for rule in weight_map.rules}
    stages = [[layer for chunk in chunks for layer in chunk] for chunks in layout.stage_layers(shape.layers)]
    stage_counts = []
    for stage, layers in enumerate(stages):
        count = dict.fromkeys((field.name for field in fields(ParameterCounts) if field.name != "value_head"), 0)
        for rule in weight_map.rules:
            numel = _copies(rule, layers, stage, layout, shape.experts) * elements[rule]
            kind, is_tower = "expert" if rule.is_expert else "dense", rule.megatron_name.startswith(TOWER)
            count[kind if rule.is_trained else "buffers"] += numel
            count["tower"] += numel * is_tower
            frozen = 0
            of_adapter = is_adapter(rule.megatron_name)
            count["adapters"] += numel * of_adapter
            if shape.lora is not None and not of_adapter and rule.is_trained:
                frozen = numel
            elif freeze and rule.is_trained:
                frozen = _frozen_copies(rule, layers, stage, layout, shape.experts, freeze) * elements[rule]
            count[f"frozen_{kind}"] += frozen
            count["frozen_tower"] += frozen * is_tower
            if rule.stage == "layer" and len(rule.packing.hf_shapes[0]) == 2:
                count[f"{kind}_matrices"] += numel - frozen
                count["products"] += numel if "router" not in rule.megatron_name and not of_adapter else 0
        stage_counts.append(ParameterCounts(**count, value_head=shape.hidden if value_head and stage == layout.pp - 1 else 0))
    return tuple(stage_counts)


def _copies(rule: Rule, layers: list[int], stage: int, layout: Layout, experts: int) -> int:
    """Number of parameters of this rule on a rank of a stage."""
    is_first, is_last = stage == 0, stage == layout.pp - 1
    if rule.stage == "layer":
        times = sum(map(rule.has_layer, layers))
    else:
        times = int(is_first if rule.stage == "first" else is_last and not (rule.tied_copy and is_first))
    return times * (experts // layout.ep if rule.is_expert else 1)


def _frozen_copies(rule: Rule, layers: list[int], stage: int, layout: Layout, experts: int, freeze: tuple[str, ...]) -> int:
    """Number of them that are not trained; of ranks with different experts, on the one where fewest are."""
    patterns = ParameterPatterns(freeze)
    if not _copies(rule, layers, stage, layout, experts):
        return 0
    of_ranks = (
        [range(start, start + experts // layout.ep) for start in range(0, experts, experts // layout.ep)]
        if rule.is_expert
        else [[None]]
    )
    rule_layers = [layer for layer in layers if rule.has_layer(layer)] if rule.stage == "layer" else [None]
    return min(
        sum(patterns.choose(rule.bound(layer, expert)) for layer in rule_layers for expert in of_rank) for of_rank in of_ranks
    )


def _elements(rule: Rule, layout: Layout, shape: ModelShape) -> int:
    bound = BoundRule(rule.megatron_name, rule.hf_names, rule.packing)
    tp, padded = layout.etp if rule.is_expert else layout.tp, padded_vocab(shape.vocab, layout.tp)
    ranks = range(tp) if is_adapter(rule.megatron_name) else (0,)  # of layers in one parameter, ranks may have different ones
    return max(math.prod(bound.shape(tp, padded, tp_rank)) for tp_rank in ranks)
