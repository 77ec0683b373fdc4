"""The base of every config section, and the kinds of numbers that sections are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megarl.errors import ConfigError

Positive = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
UserFunction = Annotated[str, Field(pattern=r"^([\w.]+|.*\.py):\w+$")]
JinjaFile = Annotated[str, Field(pattern=r"^.+\.jinja$")]
TemplateChoice = Literal["auto", "always", "never"] | JinjaFile
"""Use of the tokenizer's chat template, or a Jinja file in its place."""
TEMPLATE_FILE = "chat_template.jinja"
"""Name of a chat template's file: in model folders, and in a run's folder where it uses another or options of it."""
ClassPath = Annotated[str, Field(pattern=r"^([\w.]+|.*\.py):[A-Za-z_]\w*$")]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are typed strictly, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def refusal(self, field: str, reason: str = "", **facts: Any) -> ConfigError:
        """Make the error about the value of `field`, a dotted name inside this section; `facts` as in `ConfigError.of`."""
        value: Any = self
        for name in re.findall(r"\w+", field):
            if isinstance(value, Mapping):
                value = value[name]
            else:
                value = value[int(name)] if name.isdigit() else getattr(value, name)
        return ConfigError.of(field, value, reason, **facts)
