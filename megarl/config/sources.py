"""The sections of sources of rows, which several sections of the config hold; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.section import Count, NonNegative, Positive, Section

HELD_OUT_ROWS, HELD_OUT_SEED = 200, 1_000_000
"""`limit` and `seed` of held-out rows that are generated: they keep clear of the training rows."""

OnChange = Literal["refuse", "append", "restart"]
"""The ways of a run that goes on from a checkpoint with other training rows: the values of `data.on_change`."""


class SourceConfig(Section):
    """A source of rows."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "dataset", "python", "mixture"] = "reasoning_gym"
    """Kind of source. `dataset`: a Hugging Face datasets folder or data set. `mixture`: several sources with weights."""
    name: str | None = None
    """Task name (reasoning_gym), `package.module:function` or `path/to/file.py:function` (python), or a data set's
    configuration (dataset of the hub)."""
    path: str | None = None
    """File of rows (jsonl, parquet); folder of them, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hugging Face hub (dataset)."""
    split: str | None = None
    """Split of the data set (dataset), such as `train`. null: the only one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task (reasoning_gym) or function (python)."""
    limit: Positive | None = None
    """Maximum number of rows. Generated tasks: how many to generate (null: 1000). Files: read only the first ones (null:
    all)."""
    seed: Count = 0
    """Seed of generated tasks. Row i is generated from seed + i."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Renames keys of a row, as `new name: name in the row`. Other keys keep their names."""
    keep: dict[str, Annotated[tuple[float | None, float | None], Field(strict=False)]] = Field(default_factory=dict)
    """Bounds of numbers in a row, as `key: [minimum, maximum]` (null: no bound), such as `pass_rate: [0.1, 0.9]`. Other rows
    are left out and counted."""
    parts: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = ()
    """The sources of a mixture. The mixture's own `limit` applies to each of them."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this source among the parts of a mixture: rows are drawn in proportion to it."""
    weight_by_step: dict[Annotated[int, Field(ge=0, strict=False)], NonNegative] = Field(default_factory=dict)
    """Weights at some steps (counted from 0), as `step: weight`, instead of `weight`: linear between them, constant outside."""


def weight_at(weights: Mapping[int, float], step: int) -> float:
    """The weight at `step` of weights by step: linear between the steps given, constant before the first and after the last."""
    points = sorted(weights.items())
    if step <= points[0][0]:
        return points[0][1]
    for (start, low), (end, high) in pairwise(points):
        if step <= end:
            return low + (high - low) * (step - start) / (end - start)
    return points[-1][1]


def held_out_defaults(tree: Any, field: str) -> Any:
    """A section as given, whose source of held-out rows under `field` keeps clear of training rows if it generates them."""
    rows = tree.get(field) if isinstance(tree, dict) else None
    if isinstance(rows, dict) and rows.get("source", "reasoning_gym") == "reasoning_gym":
        return tree | {field: {"limit": HELD_OUT_ROWS, "seed": HELD_OUT_SEED} | rows}
    return tree
