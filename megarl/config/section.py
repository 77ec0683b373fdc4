"""The base of every config section, and the kinds of numbers that sections are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
UserFunction = Annotated[str, Field(pattern=r"^([\w.]+|.*\.py):\w+$")]
ClassPath = Annotated[str, Field(pattern=r"^([\w.]+|.*\.py):[A-Za-z_]\w*$")]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are typed strictly, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)
