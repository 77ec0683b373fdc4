"""Sampling sessions as they are in memory, the adapters that they sample with, and weights that are passed on to them.

Such weights lie in a folder in scratch, with a note beside it for the server after a crash.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from megarl.options.serve.places import CheckpointPath
from megarl.system.atomic_files import write_text_atomically

NOTE = ".json"
"""Ending of the note beside a folder."""


@dataclass
class ServedAdapter:
    """Adapters that engines have. `path`: the checkpoint that they are of, pinned; None: they lie in scratch.

    `model`: what clients call it, a checkpoint's path or the model that passed it on.
    """

    name: str
    folder: Path
    model: str
    path: CheckpointPath | None = None
    users: int = 0
    """Sampling sessions that sample with it, or would, and requests and calls that do."""
    used: float = 0.0
    ready: asyncio.Task[None] | None = None


@dataclass
class SamplingSession:
    """Something that a client samples from. `adapter` None: the base model; `inflight`: always the newest of this model."""

    id: str
    tenant: str
    session: str
    base_model: str
    digest: bytes
    adapter: ServedAdapter | None = None
    inflight: str = ""
    path: str = ""
    """Of a session that was there before a restart: the checkpoint that is loaded when it samples first."""
    clones: int = 0
    used: float = 0.0
    waiting: int = 0
    """Requests that wait or run."""
    over: str = ""
    """Why it cannot be sampled from any more."""


@dataclass(frozen=True)
class PassedWeights:
    """Weights that a model passes on by a folder in scratch, for a sampling session of that id."""

    id: str
    tenant: str
    session: str
    base_model: str
    model: str
    inflight: str
    folder: Path
    request: str = ""
    """The digest of the request for it, in hex."""
    is_there: bool = False
    """Whether it was passed on already, before a crash."""

    def write(self) -> None:
        """Write it beside the folder, which is whole, for the server after a crash."""
        note = {name: getattr(self, name) for name in ("id", "tenant", "session", "base_model", "model", "inflight", "request")}
        write_text_atomically(self.folder.with_name(f"{self.folder.name}{NOTE}"), json.dumps(note))

    def remove(self) -> None:
        """Remove the folder."""
        remove_passed(self.folder)


def folder_of_note(note: Path) -> Path:
    """The folder that a note is of."""
    return note.with_name(note.name[: -len(NOTE)])


def remove_passed(folder: Path) -> None:
    """Remove a folder of weights that were passed on, its note first."""
    folder.with_name(f"{folder.name}{NOTE}").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
