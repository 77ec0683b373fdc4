"""Checkpoints as downloads: links that are good for a while without a key, tar files of adapters, encrypted files."""

from __future__ import annotations

import hmac
import json
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.values import RequestError

LINK_S = 1_800
"""Seconds for which a link is good; clients ask for new ones five minutes before the end."""
ROUTE = "/api/v1/download"
ARCHIVE = "checkpoint.tar"
"""The file of a link that stands for all adapter files."""
MOST_RECIPIENTS = 32
_BLOCK = 2**20
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class DownloadLinks:
    """Links with signatures: who has one may fetch one file of one checkpoint, as its tenant may, until it ends."""

    secret: bytes
    clock: Callable[[], float] = time.time

    def link(self, base: str, tenant: str, path: CheckpointPath, file: str, expires: int) -> str:
        """The URL of `file` below the server's URL `base`; `expires` in seconds since 1970."""
        query = {"tenant": tenant, "expires": expires, "signature": self._signature(tenant, path, file, str(expires))}
        return f"{base.rstrip('/')}{ROUTE}/{quote(path.run)}/{path.kind}/{quote(path.name)}/{quote(file)}?{urlencode(query)}"

    def check(self, tenant: str, path: CheckpointPath, file: str, expires: str, signature: str) -> None:
        """Refuse a link that was not signed by this server, or has ended.

        Raises:
            RequestError: with status 403.
        """
        good = hmac.compare_digest(self._signature(tenant, path, file, expires).encode(), signature.encode(errors="replace"))
        if not good or not expires.isdecimal() or int(expires) <= self.clock():
            raise RequestError("the link is not signed by this server, or has ended; ask for a new one", status=403)

    def _signature(self, tenant: str, path: CheckpointPath, file: str, expires: str) -> str:
        signed = json.dumps(["download", tenant, path.text, file, expires])
        return hmac.digest(self.secret, signed.encode(), "sha256").hex()


def adapter_files(path: CheckpointPath, files: Mapping[str, int]) -> dict[str, str]:
    """The files of a checkpoint's adapters: their names in a PEFT folder, and those from the data folder.

    Raises:
        RequestError: it has none.
    """
    configs = sorted((name for name in files if name.rpartition("/")[2] == _ADAPTER), key=lambda name: (name.count("/"), name))
    if not configs:
        raise RequestError(f"{path} has no adapters to download; save them with save_weights_external, and download these")
    prefix = configs[0][: -len(_ADAPTER)]
    return {name[len(prefix) :]: name for name in sorted(files) if name.startswith(prefix)}


def tar_bytes(files: Mapping[str, Path], created: float) -> int:
    """Bytes that `tar_of` makes of these files."""
    sizes = (len(_head(name, path, created)) + -(-path.stat().st_size // 512) * 512 for name, path in files.items())
    return sum(sizes) + 1_024


def tar_of(files: Mapping[str, Path], created: float) -> Iterator[bytes]:
    """A tar file in pieces, of `files` by the names that they have in it; `created` is their time."""
    for name, path in files.items():
        yield _head(name, path, created)
        size = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                size += len(block)
                yield block
        yield b"\0" * (-size % 512)
    yield b"\0" * 1_024


def _head(name: str, path: Path, created: float) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = path.stat().st_size, int(created), 0o644
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def encrypt_files(folder: Path, recipients: Sequence[str]) -> None:
    """Encrypt every file below `folder` by age (filippo.io/age) in place; each gets the ending `.age`.

    Raises:
        RequestError: a recipient is none, or this server has no package `pyrage`.
    """
    if not 1 <= len(recipients) <= MOST_RECIPIENTS:
        raise RequestError(f"age_encryption_recipients has {len(recipients)} entries; it must have 1 to {MOST_RECIPIENTS}")
    try:
        import pyrage
    except ImportError:
        raise RequestError(
            "age_encryption_recipients needs the package pyrage on the server: install it, or leave them out"
        ) from None
    keys = [_recipient(pyrage, text) for text in recipients]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        pyrage.encrypt_file(str(path), f"{path}.age", keys)
        path.unlink()


def _recipient(pyrage: Any, text: str) -> Any:
    for kind in (pyrage.x25519, pyrage.ssh):
        with suppress(pyrage.RecipientError):
            return kind.Recipient.from_str(text)
    raise RequestError(f"age_encryption_recipients has {text[:40]!r}, which is neither an age1… key nor a public SSH key")
