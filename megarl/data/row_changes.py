"""Rows of a run that goes on from a checkpoint: the checkpoint's own, these and more, or others.

A checkpoint keeps one digest of all rows in their order. Nothing here knows of files: rows are what a sampler hands out.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import xxhash

from megarl.config.sources import OnChange
from megarl.data.rows import RowPlace
from megarl.data.sample import Prompt, Sample
from megarl.errors import CheckpointError

Rows = Literal["same", "append", "restart"]
"""The way on: as if the run had not stopped, with new rows behind those of this epoch, or from the first row."""
_KEPT_FILE = re.compile(r'"[^"]*/([0-9a-f]{16,}\.(?:png|wav))"')
"""A picture that the run keeps: its name follows from its contents, its folder from the run's name."""


def row_hashes(rows: Iterable[Prompt | Sample], place_of: Callable[[str], RowPlace]) -> array[int]:
    """A number of 64 bits for each row: of its id and of its contents, whatever the order of its keys.

    A generated row is its task, arguments and seed: some tasks have other contents in every process.
    """
    return array("Q", (xxhash.xxh3_64_intdigest(_text(row, place_of).encode(errors="surrogatepass")) for row in rows))


def _text(record: Prompt | Sample, place_of: Callable[[str], RowPlace]) -> str:
    source = place_of(record.row_id).origin.source
    content: Any = record.row
    if source is not None and source.source == "reasoning_gym":
        content = [source.name, source.args, source.seed]
    try:
        text = json.dumps([record.row_id, content], sort_keys=True, default=_plain)
    except (TypeError, ValueError):  # keys of several kinds, or a row that holds itself
        text = repr((record.row_id, sorted(map(str, record.row))))
    return _KEPT_FILE.sub(r'"\1"', text) if record.media else text


def _plain(value: Any) -> Any:
    """A value that JSON has no form for, such as a date or an array, without what changes from process to process."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if hasattr(value, "isoformat") or isinstance(value, int | float) else type(value).__name__


def digest_of(hashes: Sequence[int]) -> str:
    """The digest of rows with these hashes, in this order."""
    return xxhash.xxh3_128_hexdigest(array("Q", hashes).tobytes())


def way_on(field: str, hashes: array[int], saved: Mapping[str, Any], on_change: OnChange) -> tuple[Rows, list[str]]:
    """The way to go on over rows with these hashes from a sampler's `saved` state, and what is to be said of it.

    `field` names the source.

    Raises:
        CheckpointError: the rows are not those of the checkpoint, and `on_change` does not say what to do with these.
    """
    before, now, digest = saved["rows"], len(hashes), saved.get("digest")
    begins_alike = now >= before and digest in (None, digest_of(hashes[:before]))
    doubt = "this checkpoint of an earlier version does not tell which rows it had; only their number was compared"
    lines = [f"warning: {field}: {doubt}"] if digest is None else []
    if begins_alike and now == before:
        return "same", lines
    counts = f"{field} has {now} rows, and {before} in the checkpoint"
    if on_change == "restart":
        return "restart", [f"{counts}, which were others: it begins with the first row of the new ones (data.on_change)"]
    if on_change == "append" and begins_alike:
        return "append", [*lines, f"{counts}: the {now - before} new ones follow those of this epoch (data.on_change)"]
    if on_change == "append":
        raise CheckpointError(
            f"{counts}, but data.on_change is 'append' and its first {before} rows are not those of the checkpoint; give it "
            "the old rows before the new ones, or set data.on_change to 'restart'"
        )
    if begins_alike:
        raise CheckpointError(
            f"{counts}, which are the first of them; a resumed run must have the same data, unless data.on_change is 'append' "
            "(the old order, then the new rows) or 'restart' (from the first row of all)"
        )
    others = " with other contents" if now == before else ""
    raise CheckpointError(
        f"{counts}{others}; a resumed run must have the same data, unless data.on_change is 'restart' (from the first row of "
        "the new data)"
    )
