"""Adapters in the embedded engine: A and B as they were sent, and the weights that they are beside with B·A added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.models.registry import architecture_for
from megarl.options.lora.section import OUTPUT
from megarl.options.lora.weight_map import Lora, bound_linear_rules, is_tied, output_rule, site_of
from megarl.weights.model_compatibility import ServedModel


class Adapters:
    """The adapters of a model. They add nothing at first."""

    def __init__(self, model: ServedModel, lora: Lora, weights: Mapping[str, Tensor], module: Any) -> None:
        """`weights` are those of `module` by their names on the hub; of those beside adapters the values are kept.

        An output layer that is tied to the embedding gets a weight of its own if it has an adapter.
        """
        self._scale, self._weights = lora.scale, dict(weights)
        self._places = list(_places(model, lora))
        if any(weight == f"{OUTPUT}.weight" for weight, _, _ in self._places) and is_tied(model.weight_map):
            head = module.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
            self._weights[f"{OUTPUT}.weight"] = head.weight.detach()
        self._plain = {weight: self._weights[weight].clone() for weight, _, _ in self._places}
        like = self._weights[self._places[0][0]]
        self.tensors = {name: like.new_zeros(shape) for name, shape in model.adapter_map.hf_shapes().items()}
        """A `[rank, in]` and B `[out, rank]` of every layer, by name."""

    def add(self) -> None:
        """Have the model compute with what `tensors` hold now: W + scale·B·A, summed in float32."""
        for weight, a, b in self._places:
            product = self.tensors[b].float() @ self.tensors[a].float()
            self._weights[weight].copy_(torch.add(self._plain[weight].float(), product, alpha=self._scale))


def _places(model: ServedModel, lora: Lora) -> Iterator[tuple[str, str, str]]:
    """The names of each weight beside an adapter, of its A and of its B."""
    config = dict(model.config)
    fused = architecture_for(config).rows_together(config)
    output = output_rule(model.weight_map)
    for rule in (*bound_linear_rules(model.weight_map), *((output,) if output is not None else ())):
        if (site := site_of(rule, lora, fused)) is not None:
            for b, owner, part in zip(site.b.hf_names, site.owners, site.parts, strict=True):
                yield rule.hf_names[part], site.a.hf_names[owner], b
