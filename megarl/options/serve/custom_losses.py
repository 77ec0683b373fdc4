"""Losses that clients define: made once by session, and on disk, so that requests with them are the same after a restart."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker import types

from megarl.observe.record_lines import object_line
from megarl.options.serve.futures import Promises
from megarl.options.serve.places import folder_of
from megarl.options.serve.registry import SessionRecord
from megarl.options.serve.tenants import Tenant
from megarl.options.serve.values import RequestError
from megarl.options.serve.wire import digest_of_json
from megarl.system.atomic_files import write_text_atomically

MOST_CUSTOM_LOSSES = 256
"""Losses that a client may define in a session."""
ReadGraph = Callable[[str, Sequence[tuple[str, int]], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class _Made:
    session: str
    graph: Any
    file: Path


class CustomLosses:
    """All losses of clients, by the ids that requests have. Used in one event loop."""

    def __init__(self, folder: Path, read_graph: ReadGraph | None, promises: Promises, say: Callable[[str], None]) -> None:
        """`folder` is where they are kept; `read_graph` None: clients compute such losses themselves."""
        self._folder, self._read_graph, self._promises, self._say = folder, read_graph, promises, say
        self._made: dict[str, _Made] = {}

    def find(self, identity: str, session: str | None) -> Any:
        """The graph of a loss of a session.

        Raises:
            RequestError: the session has no such loss.
        """
        made = self._made.get(identity)
        if made is None or made.session != session:
            raise RequestError(f"the loss {identity!r:.200} does not exist; create_custom_loss makes one")
        return made.graph

    async def create(
        self, tenant: Tenant, asked: types.CreateCustomLossRequest, check_open: Callable[[], object]
    ) -> dict[str, Any]:
        """Answer `create_custom_loss` with a future: the graph is read, and nothing of it evaluated.

        `check_open` raises RequestError where the session is over.

        Raises:
            RequestError: with status 503, the loss cannot be written: the client asks again.
        """
        identity, digest = f"{asked.session_id}:loss:{asked.custom_loss_seq_id}", digest_of_json(asked)
        known = self._promises.known(identity)
        if known is not None and known.digest == digest:
            return {"request_id": identity}
        if known is not None:
            raise RequestError(f"custom_loss_seq_id is {asked.custom_loss_seq_id}, which came before with other content")
        self._promises.check_room(tenant.name)
        promise = self._promises.make(identity, tenant.name, digest)
        try:
            self._check_room(asked.session_id)
            loss = await self._make(tenant.name, asked, check_open)
            self._promises.keep(promise, {"loss_id": loss, "type": "create_custom_loss"})
        except RequestError as error:
            self._promises.fail(promise, str(error))
        except OSError as error:
            self._promises.take_back(promise)
            self._say(f"the loss {identity} cannot be written: {error}")
            raise RequestError("the server cannot write down the loss now; ask again", status=503) from None
        return {"request_id": identity}

    async def _make(self, tenant: str, asked: types.CreateCustomLossRequest, check_open: Callable[[], object]) -> str:
        loss = f"loss-{secrets.token_hex(8)}"
        graph = await asyncio.to_thread(self._read, asked)
        check_open()
        self._check_room(asked.session_id)  # others may have been read meanwhile
        file = self._folder / f"{folder_of(asked.session_id)}={loss}.json"
        self._made[loss] = _Made(asked.session_id, graph, file)
        note = {"loss": loss, "tenant": tenant, "asked": asked.model_dump(mode="json")}
        try:
            await asyncio.to_thread(_write, file, note)
            check_open()
        except BaseException:
            self._made.pop(loss, None)
            file.unlink(missing_ok=True)
            raise
        return loss

    def _check_room(self, session: str) -> None:
        if sum(made.session == session for made in self._made.values()) >= MOST_CUSTOM_LOSSES:
            raise RequestError(f"the session has {MOST_CUSTOM_LOSSES} losses already, as many as it may have")

    def _read(self, asked: types.CreateCustomLossRequest) -> Any:
        if self._read_graph is None:
            raise RequestError("this server runs no losses that clients define; forward_backward_custom computes them there")
        inputs = [(given.name, given.rank) for given in asked.inputs]
        return self._read_graph(asked.name, inputs, asked.graph.model_dump())

    def restore(self, session_of: Callable[[str, str], SessionRecord | None]) -> None:
        """Take up those of the server before, of sessions that are not over."""
        for file in sorted(self._folder.glob("*.json")):
            try:
                note = object_line(file.read_bytes())
                asked = types.CreateCustomLossRequest.model_validate(note["asked"])
                session = session_of(note["tenant"], asked.session_id)
                if session is None or session.status is not None:
                    file.unlink(missing_ok=True)
                    continue
                self._made[note["loss"]] = _Made(asked.session_id, self._read(asked), file)
                identity = f"{asked.session_id}:loss:{asked.custom_loss_seq_id}"
                if self._promises.known(identity) is None:
                    promise = self._promises.make(identity, note["tenant"], digest_of_json(asked))
                    self._promises.keep(promise, {"loss_id": note["loss"], "type": "create_custom_loss"})
            except (OSError, ValueError, LookupError, TypeError, RequestError) as error:
                self._say(f"the loss in '{file}' cannot be read and is left out: {error!r}")

    def end_session(self, session: str) -> None:
        """Forget the losses of a session."""
        for loss in [loss for loss, made in self._made.items() if made.session == session]:
            self._made.pop(loss).file.unlink(missing_ok=True)


def _write(file: Path, note: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, json.dumps(note))
