"""A bucket of an S3-compatible store as a place of second copies, by obstore, which retries and sends large files in parts.

Keys, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on), never from the config.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from megarl.errors import ConfigError, MirrorError
from megarl.options.mirror.stores import BLOCK
from megarl.runs.manifest import FileRecord
from megarl.system.redaction import redacted

_CHECKSUM = "xxh3-128"
"""The name of an object's metadata that says what is in it (`x-amz-meta-xxh3-128`)."""
_PART, _MOST_PARTS = 2**23, 9_000
_RETRIES = {"max_retries": 5, "retry_timeout": timedelta(seconds=180)}
_TIMES = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "6h"}  # a download is one request
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class S3Store:
    """A `CopyStore`: the objects below `s3://BUCKET/PREFIX/RUN/`.

    An object is there when all of it was sent, in place of the one before.
    """

    def __init__(self, mirror: str, run_name: str) -> None:
        """Nothing is sent yet.

        Raises:
            ConfigError: obstore is not installed, or does not take what the environment says.
        """
        self.address = f"{mirror.rstrip('/')}/{run_name}"
        bucket, _, prefix = self.address.removeprefix("s3://").partition("/")
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
        settings: dict[str, Any] = {} if endpoint is None else {"endpoint": endpoint}
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        try:
            self._obstore = importlib.import_module("obstore")
            self._store = importlib.import_module("obstore.store").S3Store(
                bucket,
                prefix=prefix,
                region=region,
                client_options={**_TIMES, "allow_http": str(endpoint).startswith("http://")},
                retry_config=_RETRIES,
                **settings,
            )
        except ImportError:
            raise ConfigError(
                f"run.mirror is '{mirror}', but obstore is not installed; pip install 'megarl[s3]', or name a folder"
            ) from None
        except Exception as error:  # noqa: BLE001 - obstore has no common class for what it does not take
            raise ConfigError(f"run.mirror is '{mirror}', but it cannot be used: {_reason(error)}") from None

    def sizes(self, folder: str) -> dict[str, int]:
        with self._told(folder):
            return {entry["path"]: entry["size"] for page in self._obstore.list(self._store, folder) for entry in page}

    def blocks(self, name: str) -> Iterator[bytes]:
        with self._told(name):
            for block in self._obstore.get(self._store, name).stream(min_chunk_size=BLOCK):
                yield bytes(block)

    def put(self, name: str, blocks: Iterable[bytes], record: FileRecord) -> None:
        part = max(_PART, record.bytes // _MOST_PARTS)
        content = b"".join(blocks) if record.bytes <= part else blocks
        with self._told(name):
            self._obstore.put(
                self._store, name, content, attributes={_CHECKSUM: record.xxh3_128}, chunk_size=part, max_concurrency=4
            )

    def holds(self, name: str, record: FileRecord) -> bool:
        # as its metadata says, so nothing is read
        with self._told(name):
            entry = self._obstore.get(self._store, name, options={"head": True})
            return bool(entry.meta["size"] == record.bytes and entry.attributes.get(_CHECKSUM) == record.xxh3_128)

    def remove(self, names: Sequence[str]) -> None:
        for name in names[:1]:  # what tells that the others are whole goes first
            self._remove([name])
        for start in range(1, len(names), 1000):
            self._remove(names[start : start + 1000])

    def unfinished(self, folder: str) -> str:
        return folder  # an object cannot be renamed

    def complete(self, folder: str) -> None:
        """Nothing is left to do."""

    def _remove(self, names: Sequence[str]) -> None:
        with self._told(names[0]):
            try:
                self._obstore.delete(self._store, list(names))
            except FileNotFoundError:
                return

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        base = self._obstore.exceptions.BaseError
        try:
            yield
        except (base, OSError) as error:
            raise MirrorError(f"'{self.address}/{name}': {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What obstore's page of text says: the store's own code and words, or why it could not be asked."""
    text = str(error)
    request = re.search(r"performing (\w+ [^\s?]+)", text)
    code, message = (re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("Code", "Message"))
    causes = re.findall(r'\b(?:message|error): "(.+?)"', text)
    words = ": ".join(match[1] for match in (code, message) if match) or (causes[-1] if causes else text.partition("\n")[0])
    return redacted(" ".join(f"{words} ({request[1]})".split()) if request and request[1] not in words else words)
