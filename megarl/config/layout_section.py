"""A parallel layout as a section of the config: the value of `layout.py` with types checked and a line under each leaf."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as validated_dataclass

from megarl.config.layout import Layout
from megarl.config.section import Positive
from megarl.errors import LayoutError


# not strict as a whole: a strict dataclass takes only instances, and YAML brings mappings
@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class LayoutConfig(Layout):
    """Ranks per parallel dimension. A `Layout` itself, so every room can use it as one."""

    tp: Positive = 1
    """Tensor-parallel ranks: each holds a slice of every matrix."""
    pp: Positive = 1
    """Pipeline stages: each holds consecutive layers."""
    cp: Positive = 1
    """Context-parallel ranks: each holds a part of every sequence."""
    ep: Positive = 1
    """Expert-parallel ranks of mixture-of-experts layers."""
    etp: Positive = 1
    """Tensor-parallel ranks inside each expert."""
    dp: Positive = 1
    """Data-parallel replicas of the dense layers."""
    vpp: Annotated[int, Field(ge=2, strict=True)] | None = None
    """Virtual pipeline chunks per stage (interleaved schedule). null: one."""
    sequence_parallel: Annotated[bool, Field(strict=True)] = False
    """Sequence parallelism: split activations between tensor-parallel regions along the sequence. Needs tp of at least 2."""
    first_stage_layers: Positive | None = None
    """Number of layers of the first pipeline stage, over all its chunks. null: the same as other stages."""
    last_stage_layers: Positive | None = None
    """Number of layers of the last pipeline stage, over all its chunks. null: the same as other stages."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except LayoutError as error:  # pydantic adds the field's place only to ValueErrors
            raise ValueError(error) from error
