"""Formats of engines' folders with weights in few bits: which ones, as which tensors, and what config.json says. Without torch.

| format | a weight `X.weight` `[R, C]` is | source |
|---|---|---|
| `fp8-block` | itself in float8, `X.weight_scale_inv` float32 `[R / 128, C / 128]` | DeepSeek-V3, transformers |
| `mxfp8` | itself in float8, `X.weight_scale_inv` uint8 `[R, C / 32]`: exponents plus 127 | OCP Microscaling, SGLang |
| `int4` | of experts alone: `X.weight_packed` int32 `[R, C / 8]`, `X.weight_scale` bfloat16 `[R, C / group]` and \
`X.weight_shape` int64 `[2]` | compressed-tensors `pack-quantized` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

from megarl.errors import ModelError
from megarl.models.packings import FP8_BLOCK, SCALE_SUFFIX, Packing, Sections
from megarl.models.registry import architecture_for
from megarl.models.weight_formats import StoredPart
from megarl.models.weight_map import BoundRule, Rule, WeightMap
from megarl.options.few_bits.packings import BlockScales, GroupedColumns, WeightShapes

AnyRule = TypeVar("AnyRule", Rule, BoundRule)
FormatName = Literal["fp8-block", "mxfp8", "int4"]
MX_GROUP = 32
"""Columns of a row that share a scale in MXFP8."""
INT4_GROUPS = (32, 64, 128)
PER_WORD = 8
"""Numbers of four bits in an int32."""
PACKED, GROUP_SCALE, SHAPE = "_packed", "_scale", "_shape"
"""Endings that compressed-tensors adds to a weight's name."""
NOT_EXPERTS = r"re:^(?!.*\.experts\.\d+\.).*$"
"""The modules of a model that are no expert's, as compressed-tensors' `ignore` takes them."""


@dataclass(frozen=True)
class FewBits:
    """A `WeightFormat` (models/weight_formats.py): the format of the weights of linear layers in an engine's folder.

    `group`: columns that share a scale in a row (of `fp8-block`: in 128 rows). `scales` are those of `fp8-block`.
    """

    name: FormatName
    group: int
    scales: Literal["float", "power_of_two"] = "float"

    @property
    def rows_per_scale(self) -> int:
        """Rows that share a scale."""
        return FP8_BLOCK if self.name == "fp8-block" else 1

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of a weight's name for the tensors that it is stored as: its values, their scales, and the others."""
        return (PACKED, GROUP_SCALE, SHAPE) if self.name == "int4" else ("", SCALE_SUFFIX)

    def width(self, cols: int) -> int:
        """Values of a row that is stored as `cols` numbers."""
        return cols * PER_WORD if self.name == "int4" else cols

    def applies_to(self, megatron_name: str) -> bool:
        """Return whether a parameter is stored so: weights of linear layers, but for router and output layer."""
        return is_linear_weight(megatron_name) and (self.name != "int4" or ".local_experts." in megatron_name)

    def parts(self, packing: Packing) -> tuple[StoredPart, ...]:
        """Tensors as which the weights of a parameter are stored.

        Raises:
            ModelError: groups do not fit into its columns.
        """
        if self.name == "fp8-block":
            return StoredPart("", packing, "float8_e4m3fn"), StoredPart(SCALE_SUFFIX, BlockScales(packing), "float32")
        width = packing.hf_shapes[0][1]
        if width % self.group:
            raise ModelError(
                f"a linear layer has an input width of {width}, but in {self.name} {self.group} numbers of a row share a "
                f"scale; it must be a multiple of {self.group}"
            )
        scales = GroupedColumns(packing, self.group, self.group)
        if self.name == "mxfp8":
            return StoredPart("", packing, "float8_e4m3fn"), StoredPart(SCALE_SUFFIX, scales, "uint8")
        return (
            StoredPart(PACKED, GroupedColumns(packing, PER_WORD, self.group), "int32"),
            StoredPart(GROUP_SCALE, scales, "bfloat16"),
            StoredPart(SHAPE, WeightShapes(packing), "int64"),
        )

    def quantised_map(self, weight_map: WeightMap) -> WeightMap:
        """The map of a model that is stored so: in the place of a weight's rule one for each of its parts.

        Raises:
            ModelError: groups do not fit into a weight, or there is nothing to quantise.
        """
        rules: list[Rule] = []
        for rule in weight_map.rules:
            if not self.applies_to(rule.megatron_name):
                rules.append(rule)
                continue
            for part in self.parts(rule.packing):
                rules.append(rule_of_part(replace(rule, te_name=None) if part.suffix else rule, part))
        if len(rules) == len(weight_map.rules):
            raise ModelError(f"{self.name} is for the weights of experts, and the model has none")
        return replace(weight_map, rules=tuple(rules))

    def quantization_config(self, weight_map: WeightMap) -> dict[str, Any]:
        """The section of config.json on such weights; all tensors without scales stay as they are."""
        if self.name == "int4":
            return {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_WEIGHTS | {"group_size": self.group}}},
                "ignore": ["lm_head", NOT_EXPERTS],
            }
        unquantised = {
            name.removesuffix(".weight")
            for rule in weight_map.bound_rules()
            if rule.layer is not None and not self.applies_to(rule.megatron_name)
            for name, shape in rule.hf_shapes.items()
            if len(shape) == 2 and name.endswith(".weight")
        }
        method = {"quant_method": "fp8" if self.name == "fp8-block" else "mxfp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        block = [FP8_BLOCK, FP8_BLOCK] if self.name == "fp8-block" else [1, MX_GROUP]
        return {**method, "weight_block_size": block, "modules_to_not_convert": ["lm_head", *sorted(unquantised)]}

    def check_model(self, hf_config: dict[str, Any]) -> None:
        """Refuse a model that is not stored in the format, or of which engines would quantise other weights than megarl.

        Raises:
            ModelError: names the reason.
        """
        architecture = architecture_for(hf_config)
        if (why := self.refusal(hf_config)) is not None:
            family = f"a model of family '{architecture.name}'"
            raise ModelError(f"config.json: {family} cannot be stored as {self.name}: {why}")
        self.quantised_map(architecture.weight_map(hf_config))

    def refusal(self, hf_config: dict[str, Any]) -> str | None:
        """Why no model of this kind is stored so, whatever its widths; None: it may be."""
        architecture = architecture_for(hf_config)
        weight_map = architecture.weight_map(hf_config)
        if architecture.vision(hf_config) is not None:
            return "it has a vision tower, whose weights engines would quantise too"
        if architecture.linear(hf_config) or any(isinstance(rule.packing, Sections) for rule in weight_map.rules):
            return "it has linear attention, state spaces or compressed keys, whose projections megarl does not quantise"
        if architecture.fused_experts is not None or architecture.fused_rows is not None:
            return "folders of its family store several weights as one tensor"
        return None

    def check_ranks(self, hf_config: dict[str, Any], tp: int, etp: int) -> None:
        """Refuse training ranks that would share a group of numbers which has one scale.

        Raises:
            LayoutError: names the width and the group.
            ModelError: the format does not go with the model.
        """
        for rule in self.quantised_map(architecture_for(hf_config).weight_map(hf_config)).rules:
            if isinstance(rule.packing, GroupedColumns):
                rule.packing.runs(0, etp if rule.is_expert else tp, None)


INT4_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "dynamic": False,
    "actorder": None,
}
FP8 = FewBits("fp8-block", FP8_BLOCK)
MXFP8 = FewBits("mxfp8", MX_GROUP)


def int4(group: int) -> FewBits:
    """INT4 of experts, `group` columns of a row with one scale."""
    return FewBits("int4", group)


FORMATS = {"fp8-block": FP8, "mxfp8": MXFP8} | {f"int4-{group}": int4(group) for group in INT4_GROUPS}
"""By the names that `megarl convert export --dtype` has."""


def rule_of_part(rule: AnyRule, part: StoredPart) -> AnyRule:
    """The rule of one of the tensors that a weight with this rule is stored as."""
    names = tuple(name + part.suffix for name in rule.hf_names)
    megatron_name = rule.megatron_name + part.suffix
    return replace(rule, megatron_name=megatron_name, hf_names=names, packing=part.packing, dtype=part.dtype)


def is_linear_weight(megatron_name: str) -> bool:
    """Return whether a parameter is the weight of a linear layer; not of those that score: router, indexer and output layer.

    Of an indexer it is what gives its heads their weights, which published folders and SGLang have in bfloat16.
    """
    module, _, name = megatron_name.rpartition(".")
    layer = module.rpartition(".")[2]
    return name == "weight" and layer.startswith("linear_") and layer != "linear_weights_proj"


def stored_format(hf_config: Mapping[str, Any]) -> FewBits:
    """The format of weights in the folder of a `config.json` that has a `quantization_config`.

    Raises:
        ModelError: they are quantised in another way, or the model is of a family that is not served so.
    """
    return _stored_format(json.dumps(hf_config, sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _stored_format(config: str) -> FewBits:
    """The same, of the text of a `config.json`: a search asks for each layout, and a large model's experts take a second."""
    hf_config = json.loads(config)
    quantisation = hf_config["quantization_config"]
    few_bits = _format_of(quantisation)
    if few_bits is None:
        what = {name: quantisation[name] for name in ("quant_method", "weight_block_size", "format") if name in quantisation}
        raise ModelError(
            f"config.json: quantization_config says {what}, but weights can only be sent to, and read from, a folder that is "
            f"not quantised, or of quant_method 'fp8' with weight_block_size [{FP8_BLOCK}, {FP8_BLOCK}], 'mxfp8', or "
            "'compressed-tensors' with format 'pack-quantized' and symmetric INT4 weights of experts, in groups of "
            f"{', '.join(map(str, INT4_GROUPS))}"
        )
    plain = {name: value for name, value in hf_config.items() if name != "quantization_config"}
    few_bits.check_model(plain)
    if few_bits.name == "int4":
        _check_ignored(quantisation, architecture_for(plain).weight_map(plain))
    return few_bits


def _format_of(quantisation: Mapping[str, Any]) -> FewBits | None:
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    if method == "fp8" and list(block or ()) == [FP8_BLOCK, FP8_BLOCK]:
        return FewBits("fp8-block", FP8_BLOCK, "power_of_two" if quantisation.get("scale_fmt") == "ue8m0" else "float")
    if method == "mxfp8" and list(block or (1, MX_GROUP)) == [1, MX_GROUP]:
        return MXFP8
    groups = quantisation.get("config_groups")
    if method != "compressed-tensors" or quantisation.get("format") != "pack-quantized" or not isinstance(groups, dict):
        return None
    if len(groups) != 1 or any(quantisation.get(name) for name in ("kv_cache_scheme", "sparsity_config", "transform_config")):
        return None
    [group] = groups.values()
    weights = group.get("weights") or {}
    same = all((weights.get(name) or None) == (value or None) for name, value in INT4_WEIGHTS.items())
    plain = group.get("targets") == ["Linear"] and not group.get("input_activations") and not group.get("output_activations")
    return int4(weights["group_size"]) if same and plain and weights.get("group_size") in INT4_GROUPS else None


def _check_ignored(quantisation: Mapping[str, Any], weight_map: WeightMap) -> None:
    """Refuse a folder that keeps an expert's weight as it is, or stores another linear layer in INT4."""
    ignored = [str(name) for name in quantisation.get("ignore") or ()]
    for rule in weight_map.bound_rules():
        if not is_linear_weight(rule.megatron_name):
            continue
        for name in rule.hf_names:
            module = name.removesuffix(".weight")
            if any(_matches(pattern, module) for pattern in ignored) == (rule.expert is not None):
                what = "leaves out an expert" if rule.expert is not None else "leaves in a linear layer that is no expert's"
                only = "weights in INT4 must be those of experts alone"
                raise ModelError(f"config.json: quantization_config.ignore {what}, '{module}'; {only}")


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.endswith(f".{pattern}")
