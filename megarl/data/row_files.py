"""Rows of one file, of the kind that its ending or its source tells, compressed or not, with the line that each is on.

Text is read line by line and a list of JSON element by element, so that memory holds one row however long the file is.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any, cast

from megarl.config.sources import COMPRESSED, ENDINGS, kind_of_path
from megarl.data.arrow_tables import table_rows
from megarl.data.csv_rows import csv_rows
from megarl.data.data_source import Row
from megarl.data.json_rows import json_rows
from megarl.data.row_lines import NumberedRow, TextFile
from megarl.errors import DataError

TABLES = ("parquet", "arrow")
"""Kinds of files that are no text."""
MOST_UNPACKED = 1 << 30
"""Bytes that a compressed Parquet file may always have; above it, `MOST_RATIO` times the bytes that it is compressed to."""
MOST_RATIO = 50
MARKS = {
    b"\x1f\x8b": "gzip data, whose name must end in .gz",
    b"\x28\xb5\x2f\xfd": "Zstandard data, whose name must end in .zst",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a ZIP archive, which must be unpacked",
    b"BZh": "bzip2 data, which must be unpacked",
    b"\xfd7zXZ": "xz data, which must be unpacked",
    b"\xff\xfe": "UTF-16 text, which must be saved as UTF-8",
    b"\xfe\xff": "UTF-16 text, which must be saved as UTF-8",
    b"version https://git-lfs": "a pointer of Git LFS in place of the file; get it with git lfs pull",
}
"""First bytes of files -> what they are."""


def kind_of_file(path: PurePath) -> str | None:
    """`jsonl`, `csv`, `tsv`, `parquet` or `arrow`, as the file's ending tells; None where it tells none of these."""
    return "arrow" if path.suffix.lower() == ".arrow" else kind_of_path(path.name)


def allowed_endings() -> str:
    """The endings that tell a kind, as errors list them."""
    return f"{', '.join(ENDINGS)}, alone or with {' or '.join(COMPRESSED)} behind it"


def file_rows(path: Path, kind: str) -> Iterator[Row]:
    """The rows of `path`, read as `kind`.

    Raises:
        DataError: names the file, and the line where it is text, that is damaged or of another kind.
    """
    for _, row in numbered_rows(path, kind):
        yield row


def numbered_rows(path: Path, kind: str) -> Iterator[NumberedRow]:
    """`file_rows` with the line that each row begins on, counted from 1; 0 where the file has no lines."""
    reader = {"jsonl": json_rows, "csv": csv_rows, "tsv": csv_rows}.get(kind)
    rows = reader(TextFile(path, kind, lambda: open_bytes(path))) if reader is not None else _rows_of_table(path, kind)
    number = -1
    try:
        for number, row in enumerate(rows):  # noqa: B007 - read below
            yield row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' {_damage(path, error, number + 1)}") from None
    except DataError as error:
        if number >= 0 or not (told := _what_it_is(path, kind)):
            raise
        raise DataError(f"{error}; {told}") from None


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, uncompressed as its ending says.

    Raises:
        OSError: it cannot be opened.
    """
    suffix = path.suffix.lower()
    if suffix == ".gz":
        import gzip

        return cast(IO[bytes], gzip.open(path))
    if suffix == ".zst":
        import pyarrow

        stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        return io.BufferedReader(stream, 1 << 20)
    return path.open("rb", buffering=1 << 20)


def _rows_of_table(path: Path, kind: str) -> Iterator[NumberedRow]:
    if path.suffix.lower() not in COMPRESSED:
        yield from ((0, row) for row in table_rows(path, kind))
        return
    import tempfile

    most = max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size)
    with tempfile.NamedTemporaryFile(suffix=f".{kind}") as unpacked:  # Parquet is read from its end
        with open_bytes(path) as packed:
            while piece := packed.read(1 << 20):
                unpacked.write(piece)
                if unpacked.tell() > most:
                    raise DataError(f"'{path}' holds more than {most >> 20} MB once unpacked; unpack it to be read as it is")
        unpacked.flush()
        yield from ((0, row) for row in table_rows(Path(unpacked.name), kind, named=path))


def _damage(path: Path, error: Exception, rows: int) -> str:
    """The fault of a file that cannot be read on behind `rows` rows."""
    packing = {".gz": "gzip", ".zst": "Zstandard"}.get(path.suffix.lower())
    if isinstance(error, OSError) and error.errno:
        return f"cannot be read: {error.strerror}"
    if packing is None:
        return f"cannot be read: {error}"
    if isinstance(error, EOFError) or "Truncated" in str(error):
        return f"is cut off: its {packing} data end in the middle, behind row {rows}; it must be complete"
    behind = f" behind row {rows}" if rows else ", as its name says; it must be, or end otherwise"
    return f"is not {packing} data{behind} ({str(error).splitlines()[0]})"


def _what_it_is(path: Path, kind: str) -> str:
    """A sentence's end about a file that is not what it is read as; empty where nothing tells another kind."""
    with path.open("rb") as file:
        start = file.read(32)
    if mark := next((what for mark, what in MARKS.items() if start.startswith(mark)), None):
        return "" if path.suffix.lower() in COMPRESSED or mark == f"a {kind.capitalize()} file" else f"it begins as {mark}"
    told = kind_of_path(path.name)
    return f"by its ending it is {told}: remove source: {kind}, or set it to {told}" if told not in (None, kind) else ""
