"""The sections of sources of rows, which several sections of the config hold; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megarl.config.row_template import ColumnOrTemplate
from megarl.config.section import Count, NonNegative, Positive, Section

HELD_OUT_ROWS, HELD_OUT_SEED = 200, 1_000_000
"""`limit` and `seed` of held-out rows that are generated: they keep clear of the training rows."""
FILE_SOURCES = ("jsonl", "csv", "tsv", "parquet", "dataset")
"""Kinds of source that read what is under `path`."""
ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
"""Endings of files of rows -> the kind of source that reads them."""
COMPRESSED = (".gz", ".zst")
"""Endings that may stand behind those of `ENDINGS`."""


def kind_of_path(path: str) -> str | None:
    """The kind of source that the ending of `path` tells; None where it tells none, as of a folder or a data set of the hub."""
    name = path.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return None if path.startswith("hf://") else next((kind for end, kind in ENDINGS.items() if name.endswith(end)), None)


OnChange = Literal["refuse", "append", "restart"]
"""The ways of a run that goes on from a checkpoint with other training rows: the values of `data.on_change`."""


class SourceConfig(Section):
    """A source of rows."""

    source: Literal["reasoning_gym", "jsonl", "csv", "tsv", "parquet", "dataset", "python", "mixture"] = "reasoning_gym"
    """Kind of source. null: as `path` ends (`dataset`: a folder or a data set of the hub); as `parts` and
    `name` tell (mixture, python); else reasoning_gym."""
    name: str | None = None
    """Task name (reasoning_gym), `package.module:function` or `path/to/file.py:function` (python), or a data set's
    configuration (dataset of the hub)."""
    path: str | None = None
    """File of rows (.jsonl, .json, .csv, .tsv, .parquet, each also .gz or .zst), folder of such files, or `ORG/NAME` or
    `ORG/NAME@REVISION` on the Hugging Face hub."""
    split: str | None = None
    """Split of the data set (dataset), such as `train`. null: the only one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task (reasoning_gym) or function (python)."""
    limit: Positive | None = None
    """Maximum number of rows. Generated tasks: how many to generate (null: 1000). Files: read only the first ones (null:
    all)."""
    seed: Count = 0
    """Seed of generated tasks. Row i is generated from seed + i."""
    columns: dict[str, ColumnOrTemplate] = Field(default_factory=dict)
    """Renames keys of a row, as `new name: name in the row`, or makes them of several, as `new name: "{question} {hint}"`.
    Other keys keep their names."""
    keep: dict[str, Annotated[tuple[float | None, float | None], Field(strict=False)]] = Field(default_factory=dict)
    """Bounds of numbers in a row, as `key: [minimum, maximum]` (null: no bound), such as `pass_rate: [0.1, 0.9]`. Other rows
    are left out and counted."""
    parts: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = ()
    """The sources of a mixture. The mixture's own `limit` applies to each of them."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this source among the parts of a mixture: rows are drawn in proportion to it."""
    weight_by_step: dict[Annotated[int, Field(ge=0, strict=False)], NonNegative] = Field(default_factory=dict)
    """Weights at some steps (counted from 0), as `step: weight`, instead of `weight`: linear between them, constant outside."""

    @model_validator(mode="before")
    @classmethod
    def _tell_kind(cls, tree: Any) -> Any:
        return tree if not isinstance(tree, dict) or tree.get("source") is not None else tree | {"source": told_kind(tree)}


def told_kind(tree: Mapping[str, Any]) -> str:
    """The kind of a source that does not say it."""
    if tree.get("parts"):
        return "mixture"
    if isinstance(path := tree.get("path"), str):
        return kind_of_path(path) or "dataset"
    return "python" if ":" in str(tree.get("name")) else "reasoning_gym"


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
    if isinstance(rows, dict) and (rows.get("source") or told_kind(rows)) == "reasoning_gym":
        return tree | {field: {"limit": HELD_OUT_ROWS, "seed": HELD_OUT_SEED} | rows}
    return tree
