"""A parallel layout as a section of the config: the value of `layout.py` with types checked and a line under each leaf."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as validated_dataclass

from megarl.config.layout import Layout
from megarl.errors import LayoutError

Positive = Annotated[int, Field(ge=1, strict=True)]


# not strict as a whole: a strict dataclass takes only instances, and YAML brings mappings
@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class LayoutConfig(Layout):
    """Ranks per parallel dimension. A `Layout` itself, so every room can use it as one."""

    tp: Positive = 1
    """Tensor-parallel ranks: each holds a slice of every matrix."""
    pp: Positive = 1
    """Pipeline stages: each holds a run of consecutive layers."""
    cp: Positive = 1
    """Context-parallel ranks: each holds a part of every sequence."""
    ep: Positive = 1
    """Expert-parallel ranks of mixture-of-experts layers."""
    etp: Positive = 1
    """Tensor-parallel ranks inside each expert."""
    dp: Positive = 1
    """Data-parallel replicas of the dense layers."""
    vpp: Annotated[int, Field(ge=2, strict=True)] | None = None
    """Virtual pipeline chunks per stage (interleaved schedule); null: one."""
    sequence_parallel: Annotated[bool, Field(strict=True)] = False
    """Split activations between tensor-parallel regions along the sequence; needs tp of at least 2."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage, in all its chunks; null: as many as the others."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage, in all its chunks; null: as many as the others."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except LayoutError as error:  # pydantic adds the field's place only to ValueErrors
            raise ValueError(str(error)) from error
