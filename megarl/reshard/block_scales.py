"""Weight maps of FP8 engines: which tensors are FP8, and the scales beside them as rules like any other, for plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megarl.errors import EngineError, LayoutError
from megarl.models.packings import FP8_BLOCK, SCALE_SUFFIX, Packing, RowRange
from megarl.models.weight_map import Rule, WeightMap


@dataclass(frozen=True)
class BlockScales:
    """The scales of a parameter laid out by `of`, a row and a column for each block of 128.

    Every rank that holds a part of a parameter knows all of its scales (`quantise.py`); so that each is sent once, a rank's
    shard are those of the blocks that begin in its part.
    """

    of: Packing

    @property
    def tp_axis(self) -> int | None:
        """As of the parameter."""
        return self.of.tp_axis

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of each tensor."""
        return tuple(tuple(map(_up, shape)) for shape in self.of.hf_shapes)

    def runs(self, tp_rank: int, tp_size: int, padded_vocab: int | None) -> list[RowRange]:
        """The blocks that begin in the rank's part."""
        return [(part, _up(start), _up(stop)) for part, start, stop in self.of.runs(tp_rank, tp_size, padded_vocab)]

    @staticmethod
    def blocks(start: int, stop: int, length: int, name: str) -> tuple[int, int]:
        """The blocks of an interval that an engine's rank holds.

        Raises:
            LayoutError: it does not end where a block does, which SGLang refuses, too.
        """
        if start % FP8_BLOCK or (stop % FP8_BLOCK and stop != length):
            raise LayoutError(
                f"a rank of the engine would hold {start} to {stop} of '{name}', but FP8 weights are shared in whole blocks of "
                f"{FP8_BLOCK}; use a smaller target tp"
            )
        return start // FP8_BLOCK, _up(stop)


def quantised_map(weight_map: WeightMap) -> WeightMap:
    """The map of a model whose linear layers, but for router and output layer, are FP8 with scales beside them."""
    rules: list[Rule] = []
    for rule in weight_map.rules:
        if not is_quantised(rule.megatron_name):
            rules.append(rule)
            continue
        scales = replace(
            rule,
            megatron_name=rule.megatron_name + SCALE_SUFFIX,
            hf_names=tuple(name + SCALE_SUFFIX for name in rule.hf_names),
            packing=BlockScales(rule.packing),
            te_name=None,
            dtype="float32",
        )
        rules += [replace(rule, dtype="float8_e4m3fn"), scales]
    return replace(weight_map, rules=tuple(rules))


def fp8_scales(hf_config: Mapping[str, Any]) -> Literal["float", "power_of_two"] | None:
    """The scales of the FP8 model that an engine serves, by its `config.json`; None: it is not quantised.

    Raises:
        EngineError: it is quantised in another way.
    """
    quantisation = hf_config.get("quantization_config")
    if not quantisation:
        return None
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    if method != "fp8" or list(block or ()) != [FP8_BLOCK, FP8_BLOCK]:
        raise EngineError(
            f"the engine's config.json: quantization_config says {method!r} with weight_block_size {block!r}, but weights can "
            f"only be sent to a model that is not quantised, or 'fp8' with [{FP8_BLOCK}, {FP8_BLOCK}]"
        )
    return "power_of_two" if quantisation.get("scale_fmt") == "ue8m0" else "float"


def is_quantised(megatron_name: str) -> bool:
    """Whether FP8 checkpoints quantise a parameter."""
    module, _, name = megatron_name.rpartition(".")
    return name == "weight" and module.rpartition(".")[2].startswith("linear_")


def _up(size: int) -> int:
    return -(-size // FP8_BLOCK)
