"""Low-rank adapters in the weight map: which linear layers have one, and how its two matrices lie over tensor ranks.

Beside a weight W `[out, in]` an adapter has A `[rank, in]` and B `[out, rank]`; the layer computes with W + scale·B·A. Each
linear layer of the hub's model has an adapter of its own, also where Megatron holds several as one parameter: there the As
stand one below another, and the rows of B lie as those of the weight, split alike by tensor parallelism. The output layer has
one if its name is among the targets, also where it shares its weight with the embedding. Pure data, no torch.

Source: arXiv 2106.09685; names and initial values are those of PEFT (`peft.tuners.lora`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property

from megarl.errors import ConfigError, nearest
from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.fused_rows import FusedRows
from megarl.models.packings import Packing, RowRange, Vocabulary
from megarl.models.packings import padded_vocab as rows_of_all
from megarl.models.weight_map import BoundRule, Rule, WeightMap
from megarl.options.lora.section import ALL_LINEAR, OUTPUT

OUTPUT_LAYER = "output_layer"
"""megatron-core's name of the output layer."""
SUFFIX = "_lora"
"""Name of the module of a layer's adapter, behind the layer's own name."""
_LINEAR = re.compile(r"decoder\.layers\.[^.]+\.(.+\.)?(linear_\w+|in_proj|out_proj)\.weight")
_REFUSED_BY_PEFT = re.compile(r"backbone\..+\.out_proj\.weight")
_MEGATRON_WEIGHT = re.compile(r"\.weight(\d+|\{expert\})?$")


@dataclass(frozen=True)
class Lora:
    """An `AdapterSpec` (models/adapters.py): rank, scale and layers of a role's adapters.

    `targets` and `exclude`: `all-linear`, ends of names, or patterns. `folder`: where training starts from.
    """

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] = (ALL_LINEAR,)
    exclude: tuple[str, ...] = ()
    folder: str | None = field(default=None, compare=False)

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def has_adapter(self, layer: str) -> bool:
        """Return whether the linear layer of this name, such as `model.layers.0.self_attn.q_proj`, has an adapter.

        The output layer has one only where its own name is among the targets: words and patterns choose layers of the decoder.
        """
        wanted = OUTPUT in self.targets if layer == OUTPUT else self._wanted.match(layer)
        return wanted and not self._unwanted.match(layer)

    def with_adapters(self, weight_map: WeightMap, fused: FusedRows | None, field: str = "policy.lora") -> WeightMap:
        """The map with the rules of all adapters behind its own; `fused` as in `Architecture.fused_rows`.

        Raises:
            ConfigError: it chooses no layer, names one that the model does not have, or chooses some experts of a layer only.
        """
        check_targets(weight_map, self, fused, field)
        adapter_rules: list[Rule] = []
        for rule in linear_rules(weight_map):
            of_parts: dict[tuple[int, ...], tuple[Site, list[int]]] = {}
            for layer in filter(rule.has_layer, range(weight_map.num_layers)):
                experts = range(weight_map.num_experts) if rule.is_expert else (None,)
                sites = [site_of(rule.bound(layer, expert), self, fused) for expert in experts]
                if len({site and site.parts for site in sites}) > 1:
                    reason = f"chooses some of the experts of layer {layer}"
                    raise ConfigError.of(
                        f"{field}.targets", list(self.targets), reason, allowed="of all of a layer's experts or none"
                    )
                if (site := sites[0]) is not None:
                    of_parts.setdefault(site.parts, (site, []))[1].append(layer)
            for site, layers in of_parts.values():
                pattern = site_of(rule.bound("{layer}", "{expert}"), replace(self, targets=(ALL_LINEAR,), exclude=()), fused)  # type: ignore[arg-type]
                assert pattern is not None, "all layers are targets"
                adapter_rules += _patterns(rule, site, pattern, frozenset(layers))
        output = output_rule(weight_map)
        if output is not None and (site := site_of(output, self, fused)) is not None:
            bound = (site.a, site.b)
            adapter_rules += [Rule(one.megatron_name, one.hf_names, one.packing, stage="last") for one in bound]
        return replace(weight_map, rules=(*weight_map.rules, *adapter_rules))

    @cached_property
    def _wanted(self) -> _Names:
        return _Names(self.targets)

    @cached_property
    def _unwanted(self) -> _Names:
        return _Names(self.exclude)


class _Names:
    """Names of layers by words, ends and patterns."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._all, self._whole = ALL_LINEAR in entries, frozenset(entries)
        self._patterns = [re.compile(translate(entry)) for entry in entries if set(entry) & set("*?[")]

    def match(self, layer: str) -> bool:
        return (
            (self._all and layer != OUTPUT)
            or any(layer[start:] in self._whole for start in _starts(layer))
            or any(pattern.match(layer) for pattern in self._patterns)
        )


def _starts(layer: str) -> list[int]:
    """The places at which a layer's name and its ends begin."""
    return [0, *(dot.end() for dot in re.finditer(r"\.", layer))]


@dataclass(frozen=True)
class OutputRows(Vocabulary):
    """The rows of the output layer as training ranks hold them: padded so that they can share them, which needs not be told."""

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The rank's ids, and zeros behind the last one; `padded_vocab` is not used, since B has no rows of padding."""
        return super().runs(tp_rank, tp_size, rows_of_all(self.vocab_size, tp_size))


@dataclass(frozen=True)
class AdapterRows:
    """B: of the weight's tensors `parts` their rows, `rank` columns; split as the weight if that is split by rows."""

    weight: Packing
    parts: tuple[int, ...]
    rank: int

    @property
    def tp_axis(self) -> int | None:
        """Rows, if those of the weight are split."""
        return 0 if self.weight.tp_axis == 0 else None

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`[out, rank]` of each layer."""
        return tuple((self.weight.hf_shapes[part][0], self.rank) for part in self.parts)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The rows of the weight's shard, but for layers without an adapter."""
        if self.tp_axis is None:
            return [(index, 0, shape[0]) for index, shape in enumerate(self.hf_shapes)]
        weight_runs = self.weight.runs(tp_rank, tp_size, padded_vocab)
        places = {part: index for index, part in enumerate(self.parts)}
        return [(places[part], start, stop) for part, start, stop in weight_runs if part is not None and part in places]

    def followed(self, part: int) -> tuple[Packing, int] | None:
        """The tensor of the weight, if its rows are split."""
        return (self.weight, self.parts[part]) if self.tp_axis == 0 else None

    def held(self, start: int, stop: int, part: int, name: str) -> tuple[int, int]:
        """The same rows."""
        return start, stop


@dataclass(frozen=True)
class AdapterColumns:
    """A of `layers` layers, one below another: `[rank, in]` each, split as the weight if that is split by columns."""

    weight: Packing
    layers: int
    rank: int

    @property
    def tp_axis(self) -> int | None:
        """Columns, if those of the weight are split."""
        return 1 if self.weight.tp_axis == 1 else None

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`[rank, in]` of each layer."""
        return ((self.rank, self.weight.hf_shapes[0][1]),) * self.layers

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The columns of the weight's shard, or all of every layer."""
        if self.tp_axis == 1:
            return self.weight.runs(tp_rank, tp_size, padded_vocab)
        return [(layer, 0, self.rank) for layer in range(self.layers)]

    def followed(self, part: int) -> tuple[Packing, int] | None:
        """The weight, if its columns are split."""
        return (self.weight, 0) if self.tp_axis == 1 else None

    def held(self, start: int, stop: int, part: int, name: str) -> tuple[int, int]:
        """The same columns."""
        return start, stop


@dataclass(frozen=True)
class Site:
    """The adapters beside one Megatron weight: rules of A and B. `owners`: for each tensor of B the place of its A."""

    a: BoundRule
    b: BoundRule
    parts: tuple[int, ...]
    owners: tuple[int, ...]


def adapter_name(weight: str) -> str:
    """What parameters of the adapter beside a Megatron weight begin with, such as `..linear_qkv_lora.`.

    Of experts in one grouped module each has its own, under `local_experts`.
    """
    number = _MEGATRON_WEIGHT.search(weight)
    assert number is not None, f"'{weight}' is no weight"
    of_expert = f"local_experts.{number[1]}." if number[1] else ""
    return f"{weight[: number.start()]}{SUFFIX}.{of_expert}"


def site_of(rule: BoundRule, lora: Lora, fused: FusedRows | None) -> Site | None:
    """The adapters beside the weight of a linear layer (`linear_rules`); None: there are none.

    `fused`: layers that the hub holds as one, which have one adapter together.
    """
    stored = [_stored(name, fused) for name in rule.hf_names]
    parts = tuple(part for part, name in enumerate(stored) if lora.has_adapter(name.removesuffix(".weight")))
    if not parts:
        return None
    layers = list(dict.fromkeys(stored[part] for part in parts))
    owners = tuple(layers.index(stored[part]) for part in parts)
    name = adapter_name(rule.megatron_name)
    a = replace(
        rule,
        megatron_name=f"{name}A",
        hf_names=tuple(_tensor(layer, LORA_A) for layer in layers),
        packing=AdapterColumns(rule.packing, len(layers), lora.rank),
    )
    b = replace(
        rule,
        megatron_name=f"{name}B",
        hf_names=tuple(_tensor(rule.hf_names[part], LORA_B) for part in parts),
        packing=AdapterRows(rule.packing, parts, lora.rank),
    )
    return Site(a, b, parts, owners)


def output_rule(weight_map: WeightMap) -> BoundRule | None:
    """The output layer over the vocabulary, by its own name also where it is tied; None: the model has another one."""
    for rule in weight_map.rules:
        if rule.megatron_name == f"{OUTPUT_LAYER}.weight" and isinstance(rule.packing, Vocabulary):
            packing = OutputRows(rule.packing.vocab_size, rule.packing.hidden_size)
            return BoundRule(rule.megatron_name, (f"{OUTPUT}.weight",), packing)
    return None


def is_tied(weight_map: WeightMap) -> bool:
    """Return whether the output layer shares its weight with the embedding."""
    return any(rule.tied_copy and rule.megatron_name == f"{OUTPUT_LAYER}.weight" for rule in weight_map.rules)


def unties(weight_map: WeightMap) -> bool:
    """Return whether the output layer, with its adapter merged in, has a weight of its own in place of the embedding's."""
    return is_tied(weight_map) and any(rule.megatron_name == f"{OUTPUT_LAYER}{SUFFIX}.A" for rule in weight_map.rules)


def linear_rules(weight_map: WeightMap) -> list[Rule]:
    """The weights of linear layers of the decoder, without routers."""
    return [rule for rule in weight_map.rules if is_linear(rule)]


def bound_linear_rules(weight_map: WeightMap) -> Iterator[BoundRule]:
    """The same of every layer and expert, the layers of one rule after those of another."""
    for rule in linear_rules(weight_map):
        for layer in filter(rule.has_layer, range(weight_map.num_layers)):
            for expert in range(weight_map.num_experts) if rule.is_expert else (None,):
                yield rule.bound(layer, expert)


def is_linear(rule: Rule | BoundRule) -> bool:
    """Return whether a parameter is the weight of a linear layer of the decoder that can have an adapter.

    A router has none, nor an indexer, whose choices have no gradient, nor Nemotron-H's `out_proj`: PEFT allows none.
    """
    is_named_so = bool(_LINEAR.fullmatch(rule.megatron_name)) and ".indexer." not in rule.megatron_name
    return is_named_so and len(rule.packing.hf_shapes[0]) == 2 and not _REFUSED_BY_PEFT.fullmatch(rule.hf_names[0])


def check_targets(weight_map: WeightMap, lora: Lora, fused: FusedRows | None, field: str = "policy.lora") -> None:
    """Raise ConfigError unless every entry of `targets` and `exclude` names a linear layer, and some layer has an adapter."""
    layers = layer_shapes(weight_map, fused)
    if OUTPUT in lora.targets and OUTPUT not in layers:
        reason, which = f"names '{OUTPUT}', in whose place this role has a head of its own", "targets"
        if lora.folder is not None:
            reason, which = f"has an adapter of '{OUTPUT}', in whose place this role has a head of its own", "adapter"
        chosen = lora.folder if lora.folder is not None else list(lora.targets)
        raise ConfigError.of(f"{field}.{which}", chosen, reason, allowed=f"without '{OUTPUT}'")
    known = {ALL_LINEAR, *(layer[start:] for layer in layers for start in _starts(layer))}
    for name in ("targets", "exclude"):
        matched = [layer for layer in layers if layer != OUTPUT or name == "exclude"]
        for entry in getattr(lora, name):
            if entry not in known and not any(map(_Names((entry,)).match, matched)):
                ends = sorted({layer.rsplit(".", 1)[-1] for layer in layers})
                raise ConfigError.of(
                    f"{field}.{name}",
                    list(getattr(lora, name)),
                    f"names '{entry}', which is no linear layer that can have an adapter{nearest(entry, ends)}",
                    allowed=f"'{ALL_LINEAR}', ends of names ({', '.join(ends)}) or patterns",
                )
    if not any(map(lora.has_adapter, layers)):
        reason = "leaves no layer with an adapter"
        raise ConfigError.of(f"{field}.exclude", list(lora.exclude), reason, allowed="fewer layers than targets")


def layer_shapes(weight_map: WeightMap, fused: FusedRows | None) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of all linear layers that adapters can stand beside, by their names on the hub."""
    shapes: dict[str, tuple[int, int]] = {}
    for rule in bound_linear_rules(weight_map):
        for name, shape in rule.hf_shapes.items():
            stored = _stored(name, fused)
            rows = shape[0] if stored == name else shapes.get(stored.removesuffix(".weight"), (0, 0))[0] + shape[0]
            shapes[stored.removesuffix(".weight")] = (rows, shape[1])
    if (output := output_rule(weight_map)) is not None:
        shapes[OUTPUT] = (output.packing.hf_shapes[0][0], output.packing.hf_shapes[0][1])
    return shapes


def _patterns(rule: Rule, site: Site, whole: Site, layers: frozenset[int]) -> list[Rule]:
    """The rules of A and B for `layers`, whose adapters are as in `site`; `whole` has the names of all parts."""
    chosen = list(dict.fromkeys(whole.owners[part] for part in site.parts))
    a_names = tuple(whole.a.hf_names[owner] for owner in chosen)
    b_names = tuple(whole.b.hf_names[part] for part in site.parts)
    te = adapter_name(rule.te_name) if rule.te_name else None
    return [
        replace(
            rule,
            megatron_name=bound.megatron_name,
            hf_names=names,
            packing=packing,
            layers=layers,
            te_name=te and f"{te}{which}",
            whole_in_engines=False,
        )
        for which, bound, names, packing in (("A", whole.a, a_names, site.a.packing), ("B", whole.b, b_names, site.b.packing))
    ]


def _stored(name: str, fused: FusedRows | None) -> str:
    """The tensor in which the hub stores this one."""
    place = fused.place(name) if fused is not None else None
    return place.stored if place is not None else name


def _tensor(weight: str, kind: str) -> str:
    return weight.removesuffix(".weight") + kind
