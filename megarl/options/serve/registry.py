"""Sessions, training runs and samplers of a server, on disk, so that they are there after a restart: one JSON file for each.

All are in memory too. To a tenant, what belongs to another does not exist.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from megarl.options.serve.places import folder_of
from megarl.options.serve.values import RequestError
from megarl.system.atomic_files import write_text_atomically

IDLE = "cancelled"
"""The protocol's status of a session that the server ended."""
MOST_METADATA_BYTES = 16_384
"""Bytes of a session's, run's or checkpoint's metadata as JSON, at most."""


@dataclass(frozen=True)
class SessionRecord:
    """A client's session. `status` is the protocol's, None while it is open; times are seconds since 1970."""

    id: str
    tenant: str
    created: float
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    sdk_version: str = ""
    project_id: str = ""
    display_name: str | None = None
    status: Mapping[str, Any] | None = None
    last_seen: float = 0.0
    ended: float = 0.0
    """When it got its status; 0: it is open."""


@dataclass(frozen=True)
class ServedRun:
    """A model as the protocol's REST routes show it, a training run; `rank` None: all weights are trained."""

    id: str
    tenant: str
    created: float
    session: str
    base_model: str
    rank: int | None = None
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"type": "adamw"})
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    last_seen: float = 0.0
    corrupted: bool = False


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session: the base model, or a checkpoint, that it samples from."""

    id: str
    tenant: str
    created: float
    session: str
    base_model: str
    model_path: str | None = None
    last_used: float = 0.0
    """When it was sampled from last, up to a day before it was."""


R = TypeVar("R", SessionRecord, ServedRun, SamplerRecord)


class Records(Generic[R]):
    """Records of one kind by id. Methods may be called by several threads."""

    def __init__(self, folder: Path, kind: type[R], word: str, say: Callable[[str], None] = print) -> None:
        """Read `folder`. `word` is what sentences call a record; `say` is told of files that cannot be read."""
        self._folder, self._word, self._lock, self._writing = folder, word, threading.Lock(), threading.Lock()
        self._records: dict[str, R] = {}
        self._unwritten: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        names = {item.name for item in fields(kind)}
        for path in sorted(folder.glob("*.json")):
            try:
                content = json.loads(path.read_text())
                record = kind(**{name: value for name, value in content.items() if name in names})
                if folder_of(record.id) != path.stem:
                    raise ValueError("its id is not its name")
            except (OSError, ValueError, TypeError, AttributeError, RecursionError, RequestError) as error:
                say(f"the {word} in '{path}' cannot be read and is left out: {error!r}")
                continue
            self._records[record.id] = record

    def add(self, record: R) -> R:
        """Keep a new record.

        Raises:
            RequestError: there is one of that id, or its metadata is too long.
        """
        check_metadata(getattr(record, "user_metadata", {}))
        with self._lock:
            if record.id in self._records:
                raise RequestError(f"{self._word} {record.id} exists already", status=400)
            self._records[record.id] = record
        self._write(record.id)
        return record

    def get(self, tenant: str, identity: str) -> R:
        """The tenant's record of that id.

        Raises:
            RequestError: with status 404, also where the record is another tenant's.
        """
        record = self._records.get(identity)
        if record is None or record.tenant != tenant:
            raise RequestError(f"{self._word} {_shown(identity)} does not exist", status=404)
        return record

    def owner(self, identity: str) -> str | None:
        """The tenant of a record, for the server itself; None: there is no such record."""
        record = self._records.get(identity)
        return None if record is None else record.tenant

    def all(self) -> list[R]:
        """All records of all tenants, for the server itself."""
        with self._lock:
            return list(self._records.values())

    def of(self, tenant: str) -> list[R]:
        """All records of a tenant, the newest first."""
        with self._lock:
            records = [record for record in self._records.values() if record.tenant == tenant]
        return sorted(records, key=lambda record: (-record.created, record.id))

    def change(self, tenant: str, identity: str, **changes: Any) -> R:
        """Change fields of a record, on disk too.

        Raises:
            RequestError: with status 404, as `get`.
        """
        with self._lock:
            record = replace(self.get(tenant, identity), **changes)
            self._records[identity] = record
        self._write(identity)
        return record

    def touch(self, tenant: str, identity: str, now: float) -> None:
        """Set `last_seen`, on disk only with the next `write_touched`.

        Raises:
            RequestError: with status 404, as `get`.
        """
        with self._lock:
            self._records[identity] = replace(self.get(tenant, identity), last_seen=now)  # type: ignore[call-arg]
            self._unwritten.add(identity)

    def write_touched(self) -> None:
        """Write the records that were touched."""
        with self._lock:
            touched, self._unwritten = self._unwritten, set()
        for identity in touched:
            self._write(identity)

    def remove(self, identity: str) -> None:
        """Forget a record, on disk too; nothing is done if there is none."""
        with self._lock:
            self._records.pop(identity, None)
            self._unwritten.discard(identity)
        self._write(identity)

    def _write(self, identity: str) -> None:
        """Have the file be what the record is now, whichever thread comes last; where there is no record, no file."""
        with self._writing:
            record = self._records.get(identity)
            if record is None:
                self._path(identity).unlink(missing_ok=True)
            else:
                write_text_atomically(self._path(identity), json.dumps(asdict(record)))

    def _path(self, identity: str) -> Path:
        return self._folder / f"{folder_of(identity)}.json"


class ServerRecords:
    """Sessions, training runs and samplers."""

    def __init__(self, root: Path, say: Callable[[str], None] = print) -> None:
        """Read what is in `root`, which is made."""
        self.sessions = Records(root / "sessions", SessionRecord, "session", say)
        self.runs = Records(root / "training_runs", ServedRun, "training run", say)
        self.samplers = Records(root / "samplers", SamplerRecord, "sampler", say)

    def open_session(self, tenant: str, identity: str) -> SessionRecord:
        """The tenant's session of that id.

        Raises:
            RequestError: with status 404, as `Records.get`; with 410, it is over.
        """
        record = self.sessions.get(tenant, identity)
        if record.status is not None:
            was_idle = record.status.get("type") == IDLE
            raise RequestError(str(record.status.get("detail")) if was_idle else f"session {identity} is over", status=410)
        return record

    def check_not_idle(self, tenant: str, identity: str) -> None:
        """Refuse what is asked of a model or sampler of a session that ended because its client was not heard of.

        Raises:
            RequestError: with status 410, and what became of it.
        """
        session = identity.partition(":")[0]
        if self.sessions.owner(session) == tenant and (self.sessions.get(tenant, session).status or {}).get("type") == IDLE:
            self.open_session(tenant, session)

    def write_touched(self) -> None:
        """Write when sessions and training runs were last seen."""
        self.sessions.write_touched()
        self.runs.write_touched()


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Refuse metadata that are no names with values, or too long.

    Raises:
        RequestError: they are.
    """
    try:
        size = len(json.dumps(dict(metadata or {}), allow_nan=False).encode())
    except (TypeError, ValueError):
        raise RequestError("user_metadata must be names with texts or numbers") from None
    if size > MOST_METADATA_BYTES:
        raise RequestError(f"user_metadata have {size} bytes as JSON; they must have at most {MOST_METADATA_BYTES}")


def as_texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata as the protocol's answers have them, whose values are texts."""
    if not metadata:
        return None
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}


def _shown(identity: object) -> str:
    shown = str(identity)
    return shown if len(shown) <= 200 else f"{shown[:200]}…"
