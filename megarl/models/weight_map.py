"""The mapping core: which slices of which Hugging Face tensors make up each Megatron parameter on each rank, as data.

Pure data, without torch. Load, save, engine sync, conversion, planner and checks all go through `BoundRule`; how each kind of
parameter is laid out is in `packings.py`, which parameters there are in one file per architecture, and `weight_tensors.py`
carries a rule out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megarl.errors import ModelError, nearest
from megarl.models.packings import Packing

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4, "int64": 8}
"""Bytes of an element, by the dtype's name."""

PREDICTION = "mtp."
"""Beginning of the names of the parameters of the layer for multi-token prediction."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(
    r"(?<=\.experts\.local_experts\.)\d+(?=\.)|(?<=_lora\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$"
)


@dataclass(frozen=True)
class Rule:
    """One line of a weight map: a Megatron parameter or buffer and the Hugging Face tensors it is made of.

    Names may hold `{layer}` and `{expert}`, zero-based indices in the whole model. `layers` are those that have the
    parameter, None for all. `te_name` is the spelling under the Transformer Engine spec where it differs: a norm's weight
    lives in the linear layer that follows it, and the experts of a layer in one grouped module. `tied_copy` marks the
    output layer of a model with tied embeddings: it exists only on a last stage that is not also the first, is filled from
    the embedding, and is never exported. `dtype` (`float32`) is what it keeps whatever the model's dtype is.
    `whole_in_engines`: every rank of SGLang's engines holds all of it, though it could be split. `engine_heads`: these ranks
    hold shares of so many heads, though training ranks hold all of it. `constant`: it has no gradient.
    """

    megatron_name: str
    hf_names: tuple[str, ...]
    packing: Packing
    stage: Literal["first", "layer", "last"] = "layer"
    layers: frozenset[int] | None = None
    te_name: str | None = None
    tied_copy: bool = False
    dtype: str | None = None
    whole_in_engines: bool = False
    engine_heads: int | None = None
    constant: bool = False

    @property
    def is_trained(self) -> bool:
        """Return whether it is a parameter, and no buffer."""
        return not self.constant and self.dtype is None

    @property
    def is_expert(self) -> bool:
        """Return whether there is one for each expert, split by expert tensor parallelism instead of tensor parallelism."""
        return "{expert}" in self.megatron_name

    def spellings(self) -> tuple[str, ...]:
        """The parameter's names, one for each family of layer specs where they differ."""
        return (self.megatron_name, self.te_name) if self.te_name else (self.megatron_name,)

    def has_layer(self, layer: int) -> bool:
        """Return whether this layer of the model has the parameter."""
        return self.layers is None or layer in self.layers

    def bound(self, layer: int | None, expert: int | None) -> BoundRule:
        """The rule of one layer's parameter, and of one expert's."""
        name, *hf_names = (name.format(layer=layer, expert=expert) for name in (self.megatron_name, *self.hf_names))
        return BoundRule(name, tuple(hf_names), self.packing, self.tied_copy, layer, expert, self.dtype)


@dataclass(frozen=True)
class HFSlice:
    """`start:stop` along the rule's split axis of the tensor `hf_name`; as many zeros if that is None (vocab padding)."""

    hf_name: str | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule for one parameter of one layer, and of one expert. `hf_shapes` are the whole tensors' shapes by name.

    Where `expert` is not None, `tp_rank` and `tp_size` below are those of expert tensor parallelism, and the parameter lives
    on expert-parallel rank `expert // (num_experts // ep)`. `layer` is None outside the layers.
    """

    megatron_name: str
    hf_names: tuple[str, ...]
    packing: Packing
    tied_copy: bool = False
    layer: int | None = None
    expert: int | None = None
    dtype: str | None = None

    @property
    def tp_axis(self) -> int | None:
        """The axis that tensor parallelism splits; None if every rank holds the whole parameter."""
        return self.packing.tp_axis

    @property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole Hugging Face tensors' shapes, by name."""
        return dict(zip(self.hf_names, self.packing.hf_shapes, strict=True))

    def pieces(self, tp_rank: int, tp_size: int, padded_vocab: int | None = None) -> list[HFSlice]:
        """The pieces of the shard of `tp_rank`, in order along the split axis (axis 0 if nothing is split).

        `padded_vocab` is the whole padded vocabulary, or None for no padding; only embedding and output layer use it.

        Raises:
            LayoutError: `tp_size` does not divide the parameter.
        """
        runs = self.packing.runs(tp_rank, tp_size, padded_vocab)
        return [HFSlice(None if part is None else self.hf_names[part], start, stop) for part, start, stop in runs]

    def shape(self, tp_size: int, padded_vocab: int | None = None, tp_rank: int = 0) -> tuple[int, ...]:
        """The shape of one rank's shard; but for the scales of FP8 blocks those of all ranks are equal."""
        shape = list(self.packing.hf_shapes[0])
        shape[self.tp_axis or 0] = sum(p.stop - p.start for p in self.pieces(tp_rank, tp_size, padded_vocab))
        return tuple(shape)


@dataclass(frozen=True)
class PredictionLayer:
    """The layer for multi-token prediction that a folder may have (`prediction_layer.py`).

    `copies`: (name, whose copy it is) of tensors that a folder stores a second time with it.
    """

    rules: tuple[Rule, ...]
    copies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class WeightMap:
    """All rules of one model. Layer and expert indices are global and zero-based, as the modules' own objects say them:
    `layer.layer_number - 1`, `moe_layer.local_expert_indices`.

    `left_out` are prefixes of Hugging Face tensors that are not loaded. `prediction` is the layer for multi-token prediction
    that a folder of the model may have, `copies` what it then stores twice; `with_prediction` adds its rules to the map's.
    """

    rules: tuple[Rule, ...]
    num_layers: int
    num_experts: int = 0
    left_out: tuple[str, ...] = ()
    prediction: PredictionLayer | None = None
    copies: tuple[tuple[str, str], ...] = ()

    def rule_for(self, megatron_name: str) -> BoundRule:
        """The rule of a parameter named with its layer's and expert's global, zero-based indices, in any spelling.

        Raises:
            ModelError: the model has no such parameter.
        """
        match, expert_match = _LAYER.match(megatron_name), _EXPERT.search(megatron_name)
        layer, expert = (int(match[1]) if match else None), (int(expert_match[0]) if expert_match else None)
        pattern = _EXPERT.sub("{expert}", megatron_name)
        if match:
            pattern = f"decoder.layers.{{layer}}.{pattern[match.end() :]}"
        if (layer or 0) >= self.num_layers:
            raise ModelError(f"parameter '{megatron_name}' has no place in this model of {self.num_layers} layers")
        if expert is not None and expert >= self.num_experts:
            raise ModelError(f"parameter '{megatron_name}' has no place in this model of {self.num_experts} experts")
        for rule in self._by_name.get(pattern, ()):
            if layer is None or rule.has_layer(layer):
                return rule.bound(layer, expert)
        known = [name.format(layer=layer, expert=expert or 0) for name in self._by_name]
        raise ModelError(f"parameter '{megatron_name}' is not in this model's weight map{nearest(megatron_name, known)}")

    def bound_rules(self) -> Iterator[BoundRule]:
        """Every parameter of the whole model once, without the tied copy: embedding, layer after layer, output."""
        for stage in ("first", "layer", "last"):
            rules = [rule for rule in self.rules if rule.stage == stage and not rule.tied_copy]
            for layer in range(self.num_layers) if stage == "layer" else (None,):
                for rule in rules:
                    if layer is None or rule.has_layer(layer):
                        for expert in range(self.num_experts) if rule.is_expert else (None,):
                            yield rule.bound(layer, expert)

    def leaves_out(self, hf_name: str) -> bool:
        """Return whether a Hugging Face tensor is one that is not loaded."""
        return hf_name.startswith(self.left_out)

    def with_prediction(self) -> WeightMap:
        """The same map with the rules of the layer for multi-token prediction, if there is one."""
        if self.prediction is None:
            return self
        layer = self.prediction
        copies = tuple(copy for copy, _ in layer.copies)
        return replace(self, rules=(*self.rules, *layer.rules), left_out=copies, prediction=None, copies=layer.copies)

    def has_prediction(self, hf_names: Collection[str]) -> bool:
        """Return whether any of a folder's tensors is one of the layer for multi-token prediction."""
        rules = self.prediction.rules if self.prediction is not None else ()
        return bool({name.format(expert=0) for rule in rules for name in rule.hf_names} & {*hf_names})

    def hf_names(self) -> list[str]:
        """Every Hugging Face tensor of the whole model, each once."""
        return [name for rule in self.bound_rules() for name in rule.hf_names]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of every Hugging Face tensor of the whole model, by name."""
        return {name: shape for rule in self.bound_rules() for name, shape in rule.hf_shapes.items()}

    def without_output(self) -> WeightMap:
        """The same map without the output layer: a critic or reward model puts its own head there."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule.megatron_name != "output_layer.weight"))

    @cached_property
    def _by_name(self) -> Mapping[str, Sequence[Rule]]:
        rules_by_name: dict[str, list[Rule]] = {}
        for rule in self.rules:
            for name in rule.spellings():
                rules_by_name.setdefault(name, []).append(rule)
        return rules_by_name
