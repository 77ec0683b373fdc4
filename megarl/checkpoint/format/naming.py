"""The names and the split that megatron-core gives a model's parameters in a distributed checkpoint, from the weight map alone.

A key's tensor is what one tensor-parallel rank alone would hold. Layers of one kind share a key, stacked along a leading
axis; where layers differ (dense ones among layers with experts) each has a key of its own. Experts are stacked along an axis
after that. A gated MLP's first layer is stored in halves, all of gate before all of up; a parameter in `Sections` as a tensor
for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megarl.config.layout import Layout
from megarl.models.architecture import HFConfig
from megarl.models.packings import GateUp, Sections, Vocabulary
from megarl.models.registry import architecture_for
from megarl.models.vision import TOWER
from megarl.models.weight_map import BoundRule, Rule, WeightMap

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")

# megatron-core's local layer spec renames its norms in checkpoints, with experts and latent attention too.
_LOCAL_SPEC_RENAMES = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
_LINEAR_ATTENTION = ".self_attention.in_proj."
_WITHOUT_EXTRA_STATE = ("word_embeddings", "output_layer", "router")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a parameter in a checkpoint: index `prefix` of the leading axes, of `prefix_sizes`, of the tensors `keys`.

    The first key is the one under Transformer Engine; the others are what megatron-core's local spec says instead.
    """

    keys: tuple[str, ...]
    prefix: tuple[int, ...]
    prefix_sizes: tuple[int, ...]


@dataclass(frozen=True)
class ModelNames:
    """The weight map of a model and what else decides the names; made by `model_names`."""

    weight_map: WeightMap
    vocab_size: int
    stacks_layers: bool

    def place(self, rule: BoundRule) -> Place:
        """The place of a parameter."""
        prefix, sizes = [], []
        if rule.layer is not None and self.stacks_layers:
            prefix, sizes = [rule.layer], [self.weight_map.num_layers]
        if rule.expert is not None:
            prefix.append(rule.expert)
            sizes.append(self.weight_map.num_experts)
        keys = [self._key(name, rule) for name in self._spellings(rule)]
        return Place(tuple(dict.fromkeys(keys)), tuple(prefix), tuple(sizes))

    def first_keys(self) -> Iterator[str]:
        """The first key of every parameter, or of every section of one, each once."""
        rules = self.weight_map.bound_rules()
        yield from dict.fromkeys(self.place(rule).keys[0] + part.suffix for rule in rules for part in stored_rows(rule, 0))

    def extra_states(self) -> list[str]:
        """Unique names of the objects that megatron-core's linear layers, norms and attention want beside their weights.

        They hold the state of delayed FP8 scaling, so None in a converted checkpoint. The modules of all specs are named;
        who loads takes those that it has.
        """
        names: dict[str, None] = {}
        for rule in self.weight_map.bound_rules():
            place = self.place(rule)  # the objects of a parameter in sections go by its own key
            index = ".".join(map(str, place.prefix or (0,)))
            of = ".".join(map(str, place.prefix_sizes or (1,)))
            for key in place.keys:
                module, _, name = key.rpartition(".")
                if name != "weight" or module.endswith(_WITHOUT_EXTRA_STATE) or key.startswith(TOWER):
                    continue
                names[f"{module}._extra_state/shard_{index}_{of}"] = None
                if module.endswith("self_attention.linear_proj"):
                    names[f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{index}_{of}"] = None
        return list(names)

    def shape(self, rule: BoundRule, padded_vocab: int) -> tuple[int, ...]:
        """Shape of the parameter as one tensor-parallel rank alone would hold it."""
        return rule.shape(1, padded_vocab if is_vocabulary(rule) else None)

    def _spellings(self, rule: BoundRule) -> tuple[str, str]:
        """The parameter's name under Transformer Engine and under the local spec."""
        name = rule.megatron_name
        if rule.expert is not None:
            return name, name
        under_te = name
        for of_rule in self._with_te_name.get(_LAYER.sub("decoder.layers.{layer}.", name), ()):
            if rule.layer is None or of_rule.has_layer(rule.layer):
                under_te = of_rule.spellings()[-1].format(layer=rule.layer)
        if _LINEAR_ATTENTION in under_te:  # which the local spec does not have
            return under_te, under_te
        local = name
        for module, renamed in _LOCAL_SPEC_RENAMES:
            local = local.replace(module, renamed)
        return under_te, local

    def _key(self, name: str, rule: BoundRule) -> str:
        if rule.layer is not None and self.stacks_layers:
            name = _LAYER.sub("decoder.layers.", name)
        return _EXPERT.sub(".experts.experts.", name)

    @cached_property
    def _with_te_name(self) -> dict[str, list[Rule]]:
        rules_by_name: dict[str, list[Rule]] = {}
        for rule in self.weight_map.rules:
            if rule.te_name and not rule.is_expert:
                rules_by_name.setdefault(rule.megatron_name, []).append(rule)
        return rules_by_name


def model_names(hf_config: HFConfig, *, prediction: bool = False) -> ModelNames:
    """Names of a model's parameters; `prediction`: with those of the layer for multi-token prediction.

    Raises:
        ModelError: the architecture is unknown, or the config contradicts itself.
    """
    architecture = architecture_for(hf_config)
    kwargs = architecture.transformer_config_kwargs(hf_config)
    frequencies = (kwargs.get("moe_layer_freq", 1), kwargs.get("linear_attention_freq", 1))
    alike = not kwargs.get("hetereogenous_dist_checkpoint", False)
    weight_map = architecture.weight_map(hf_config)
    return ModelNames(
        weight_map=weight_map.with_prediction() if prediction else weight_map,
        vocab_size=architecture.gpt_kwargs(hf_config)["vocab_size"],
        stacks_layers=alike and all(isinstance(frequency, int) and frequency <= 1 for frequency in frequencies),
    )


@dataclass(frozen=True, slots=True)
class StoredRows:
    """So many `rows` of a parameter from `first` on, stored under its key with `suffix`."""

    suffix: str
    first: int
    rows: int


def stored_rows(rule: BoundRule, rows: int) -> list[StoredRows]:
    """The stored form of a parameter of so many rows, as one tensor-parallel rank alone would hold it, is stored as, in
    order."""
    if not isinstance(rule.packing, Sections):
        return [StoredRows("", 0, rows)]
    stored: list[StoredRows] = []
    first = 0
    for section in rule.packing.sections:
        length = section.rows * (section.units or rule.packing.units)
        stored.append(StoredRows(f".{section.name}", first, length))
        first += length
    return stored


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows and columns of a parameter that one rank holds, which writes them into its own file."""

    rank: int
    row: int
    rows: int
    col: int
    cols: int


def is_vocabulary(rule: BoundRule) -> bool:
    """Return whether the parameter's rows are token ids, padded so that tensor parallelism divides them."""
    return isinstance(rule.packing, Vocabulary)


def chunks_of(rule: BoundRule, rows: int, cols: int, layout: Layout, weight_map: WeightMap, stages: list[int]) -> list[Chunk]:
    """The chunks in which the ranks of a layout hold a parameter of this size; `stages` is the pipeline rank of each layer.

    Raises:
        LayoutError: the layout does not divide the parameter.
    """
    on_first = rule.megatron_name.startswith(("embedding.", TOWER))
    pp = stages[rule.layer] if rule.layer is not None else 0 if on_first else layout.pp - 1
    first_rank = layout.rank(pp=pp)
    size = layout.tp
    if rule.expert is not None:
        size = layout.etp
        first_rank += layout.etp * (rule.expert // (weight_map.num_experts // layout.ep))
    if rule.tp_axis is None:
        return [Chunk(first_rank, 0, rows, 0, cols)]
    rule.pieces(0, size, rows if is_vocabulary(rule) else None)  # raises where it does not divide
    if rule.tp_axis == 1:
        return [Chunk(first_rank + rank, 0, rows, rank * cols // size, cols // size) for rank in range(size)]
    lengths = [rows // 2] * 2 if isinstance(rule.packing, GateUp) else [part.rows for part in stored_rows(rule, rows)]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return [
        Chunk(first_rank + rank, start + rank * (length // size), length // size, 0, cols)
        for rank in range(size)
        for start, length in zip(starts, lengths, strict=True)
    ]


def stage_of_layers(layout: Layout, num_layers: int) -> list[int]:
    """The pipeline rank of each layer.

    Raises:
        LayoutError: the layers cannot be shared so.
    """
    stages = [0] * num_layers
    for stage, chunks in enumerate(layout.stage_layers(num_layers)):
        for layer in (layer for chunk in chunks for layer in chunk):
            stages[layer] = stage
    return stages


def without_quantization(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model with its values as they are after dequantisation."""
    return {name: value for name, value in hf_config.items() if name != "quantization_config"}


def default_dtype(hf_config: dict[str, Any]) -> torch.dtype:
    """The dtype that config.json states; bfloat16 where it states none."""
    return getattr(torch, str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16").removeprefix("torch."))
