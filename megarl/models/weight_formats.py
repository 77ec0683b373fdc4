"""Weights in few bits, as the rest of megarl sees them: the formats themselves are the option few_bits. Without torch.

A folder in bfloat16 or float32 has no format: None everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from megarl.errors import ConfigError, EngineError, ModelError
from megarl.models.packings import Packing
from megarl.models.weight_map import WeightMap
from megarl.option_list import part


@dataclass(frozen=True)
class StoredPart:
    """One of the tensors that a weight is stored as: what is added to the weight's name, how it lies, and its dtype."""

    suffix: str
    packing: Packing
    dtype: str


class NumberFormat(Protocol):
    """The format of the numbers of a stored matrix."""

    @property
    def name(self) -> str:
        """The format's name, as errors give it."""

    @property
    def rows_per_scale(self) -> int:
        """Rows that share a scale, and are quantised together."""

    def __hash__(self) -> int:
        """The same of equal formats."""

    def width(self, cols: int) -> int:
        """Values of a row that is stored as `cols` numbers."""


class WeightFormat(NumberFormat, Protocol):
    """The format of the weights of linear layers in an engine's folder."""

    def applies_to(self, megatron_name: str) -> bool:
        """Return whether a parameter is stored so."""

    def parts(self, packing: Packing) -> tuple[StoredPart, ...]:
        """Tensors as which the weights of a parameter are stored: values, scales and, of some formats, the weight's shape.

        Raises:
            ModelError: the format does not go with the parameter's width.
        """

    def quantised_map(self, weight_map: WeightMap) -> WeightMap:
        """The map of a model that is stored so. Raises ModelError: the format does not go with the model."""

    def quantization_config(self, weight_map: WeightMap) -> dict[str, Any]:
        """The section of config.json on such weights."""

    def check_model(self, hf_config: dict[str, Any]) -> None:
        """Raise ModelError for a model that is not stored so, or of which engines would quantise other weights."""

    def check_ranks(self, hf_config: dict[str, Any], tp: int, etp: int) -> None:
        """Raise LayoutError where training ranks would share numbers that have one scale."""


def stored_format(hf_config: Mapping[str, Any]) -> WeightFormat | None:
    """The format of weights in the folder of a `config.json`; None: they are not quantised.

    Raises:
        ModelError: they are quantised in a way that megarl, or this installation, does not know.
    """
    if not hf_config.get("quantization_config"):
        return None
    try:
        formats = part("few_bits", "formats", "config.json: quantization_config")
    except ConfigError as error:
        raise ModelError(str(error)) from None
    weight_format: WeightFormat = formats.stored_format(hf_config)
    return weight_format


def engine_format(hf_config: Mapping[str, Any]) -> WeightFormat | None:
    """Find the format, as `stored_format`, of the folder that an engine serves.

    Raises:
        EngineError: as there ModelError.
    """
    try:
        return stored_format(hf_config)
    except ModelError as error:
        raise EngineError(f"the engine's {error}") from None


def format_called(name: str, field: str) -> WeightFormat:
    """The format of this name, such as `fp8-block` or `int4-32`, which `field` asks for. Raises ConfigError: see `part`."""
    weight_format: WeightFormat = part("few_bits", "formats", field).FORMATS[name]
    return weight_format


def tensors_of(format: NumberFormat) -> ModuleType:
    """The functions on tensors in a format: `options/few_bits/tensors.py`, which imports torch."""
    return part("few_bits", "tensors", f"a weight in {format.name}")


def mxfp4_in(tensor: str) -> ModuleType:
    """Reading of experts in MXFP4, as gpt-oss stores them: `options/few_bits/mxfp4.py`, for `tensor` of a folder."""
    return part("few_bits", "mxfp4", tensor)
