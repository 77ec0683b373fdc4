"""Rows of a data set as plain dicts, from files, from reasoning-gym tasks, or from a function of the user.

Knows nothing of tokens. Whatever is wrong with a source becomes a DataError that names the file and the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from megarl.config.row_template import is_template
from megarl.config.source_checks import PROCEDURAL_ROWS
from megarl.config.sources import FILE_SOURCES
from megarl.data.hub_dataset import hub_rows
from megarl.data.row_folder import local_rows
from megarl.data.row_numbers import is_kept
from megarl.data.row_template import fill
from megarl.data.rows import DataSource, Origin, Row, RowPlace, describe_source, value_of
from megarl.errors import DataError, nearest
from megarl.system.hub import HubRepo
from megarl.system.user_code import describe, load_user_function


def load_rows(source: DataSource) -> list[Row]:
    """The rows of `source` that are kept, at once; see `rows_of`."""
    return [row for row in rows_of(source) if row is not None]


def rows_of(source: DataSource) -> Iterator[Row | None]:
    """The rows of `source`, at least one, at most `source.limit`, in the source's own order and under its `columns`.

    In place of one that `source.keep` leaves out there is None, so that rows have the numbers that they have in the file.

    They are read as they are asked for, since some hold pictures. A mixture gives the rows of its parts one after the
    other; its weights are for sampling.

    Raises:
        DataError: a file is missing, empty or damaged, a task is unknown or refuses its arguments, a function of the
            user raised or gave something else than dicts, or a row lacks a key that `columns` names.
    """
    if source.source == "mixture":
        for rows in parts_of(source):
            yield from rows
        return
    readers = {
        **dict.fromkeys(FILE_SOURCES, local_rows),
        "dataset": _dataset_rows,
        "python": _python_rows,
        "reasoning_gym": _reasoning_gym_rows,
    }
    if source.source not in readers:
        names = [*readers, "mixture"]
        raise DataError(
            f"data source is '{source.source}'{nearest(source.source, names)}; it must be one of {', '.join(names)}"
        )
    is_empty = True
    for row in _kept(islice(readers[source.source](source), source.limit), source.columns, source):
        is_empty = False
        yield row
    if is_empty:
        raise DataError(f"{describe_source(source)} holds no rows; it needs at least one")


def parts_of(source: DataSource) -> list[Iterator[Row | None]]:
    """`rows_of` every part of a mixture, at most `source.limit` of each; of another source, all its rows as one part."""
    if source.source != "mixture":
        return [rows_of(source)]
    return [_renamed(islice(rows_of(part), source.limit), source.columns, part) for part in source.parts]


def _kept(rows: Iterable[Row], columns: dict[str, str], source: DataSource) -> Iterator[Row | None]:
    for number, row in enumerate(_renamed(rows, columns, source)):
        assert row is not None, "a source gives rows"
        yield row if is_kept(row, source.keep, RowPlace(Origin("", source), number)) else None


def _renamed(rows: Iterable[Row | None], columns: dict[str, str], source: DataSource) -> Iterator[Row | None]:
    for number, row in enumerate(rows):
        if row is None or not columns:
            yield row
            continue
        place = RowPlace(Origin("", source), number)
        yield {**row, **{new: _column(row, old, f"columns.{new}", place) for new, old in columns.items()}}


def _column(row: Row, old: str, field: str, place: RowPlace) -> Any:
    return fill(old, row, field, place) if is_template(old) else value_of(row, old, field, place)


def _dataset_rows(source: DataSource) -> Iterator[Row]:
    repo = HubRepo.meant_by("dataset", source.path or "")
    return local_rows(source) if repo is None else hub_rows(source, repo)


def _python_rows(source: DataSource) -> Iterator[Row]:
    name = source.name or ""
    function = load_user_function(name, DataError)
    rows: Iterable[Any]
    try:
        rows = function(**source.args)
        if isinstance(rows, dict | str) or not isinstance(rows, Iterable):
            raise DataError(f"{describe_source(source)} returned a {type(rows).__name__}; it must return a list of dicts")
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise DataError(f"{describe_source(source)}: row {number} is a {type(row).__name__}; it must be a dict")
            yield row
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{describe_source(source)} raised {describe(error)}") from error


def _reasoning_gym_rows(source: DataSource) -> Iterator[Row]:
    """Row i is item 0 of the task seeded with seed + i: it depends on nothing else, for every task."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    task = source.name or ""
    if task not in DATASETS:
        raise DataError(
            f"reasoning_gym has no task '{task}'{nearest(task, DATASETS)}; it has {len(DATASETS)}, such as 'basic_arithmetic'"
        )
    settings = [name for name in DATASETS[task][1].__dataclass_fields__ if name not in ("seed", "size")]
    for name in source.args:
        if name not in settings:
            raise DataError(
                f"reasoning_gym task '{task}' has no argument '{name}'{nearest(name, settings)}; it has {', '.join(settings)}"
            )
    for number in range(source.limit or PROCEDURAL_ROWS):
        try:
            item = create_dataset(task, **source.args, seed=source.seed + number, size=1)[0]
        except Exception as error:
            raise DataError(
                f"reasoning_gym task '{task}' with arguments {source.args} could not make row {number}: {describe(error)}"
            ) from error
        yield {**item, "data_source": task}
