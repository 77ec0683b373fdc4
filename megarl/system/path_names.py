"""Names that people give, as parts of paths: one place that refuses or encodes what a file system would not take."""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath
from urllib.parse import quote

LONGEST_PART = 200
"""Bytes of a name between two slashes: file systems take 255, and files beside it have its name with something added."""


def why_no_folder(name: str) -> str:
    """Say why `name`, which may have slashes, names no folder below another one; empty: it does."""
    path = PurePosixPath(name)
    if not name.strip() or not name.isprintable() or path.is_absolute() or ".." in path.parts or not path.parts:
        return "names no folder inside"
    if max(len(part.encode()) for part in path.parts) > LONGEST_PART:
        return f"has more than {LONGEST_PART} bytes, which is too long for a folder inside"
    return ""


def file_name_of(name: str) -> str:
    """The name of one file for any `name`, another one for each: percent-encoded, and cut behind a digest where it is long."""
    encoded = quote(name, safe="")
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return encoded if len(encoded) <= LONGEST_PART else f"{encoded[: LONGEST_PART - 17]}-{digest}"
