"""Losses that clients define, while something happens to their session or to the disk."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from megarl.options.serve import custom_losses
from megarl.options.serve.custom_losses import CustomLosses
from megarl.options.serve.futures import Promises
from megarl.options.serve.tenants import LOCAL
from megarl.options.serve.values import RequestError


class Losses:
    """The losses of a session `s`, whose graphs are read once `may_read` is set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.promises = folder, Promises()
        self.reading, self.may_read, self.is_over = threading.Event(), threading.Event(), False
        self.losses = CustomLosses(folder, self._read, self.promises, lambda text: None)

    def _read(self, *_: Any) -> Any:
        self.reading.set()
        assert self.may_read.wait(30)
        return "graph"

    def _check(self) -> None:
        if self.is_over:
            raise RequestError("session s is over", status=410)

    def end_session(self) -> None:
        self.is_over = True
        self.losses.end_session("s")

    async def create(self, number: int = 0) -> Any:
        """What the future of a new loss has in the end."""
        graph = {"format": 1, "nodes": []}
        asked = types.CreateCustomLossRequest.model_validate(
            {"session_id": "s", "custom_loss_seq_id": number, "name": "mine", "inputs": [], "graph": graph}
        )
        future = await self.losses.create(LOCAL, asked, self._check)
        return json.loads((await self.promises.answer(LOCAL.name, future["request_id"], allow_metadata=False)).content)


def run(folder: Path, scenario: Callable[[Losses], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await scenario(Losses(folder))

    asyncio.run(asyncio.wait_for(all_of_it(), 30))


def test_a_session_that_ends_while_a_loss_is_read_has_none(tmp_path: Path) -> None:
    async def scenario(session: Losses) -> None:
        made = asyncio.create_task(session.create())
        await asyncio.to_thread(session.reading.wait, 30)
        session.end_session()
        session.may_read.set()
        assert (await made)["error"] == "session s is over"
        assert not session.losses._made
        assert not [*tmp_path.iterdir()]

    run(tmp_path, scenario)


def test_a_session_that_ends_while_a_loss_is_written_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(session: Losses) -> None:
        writing, may_write, write = threading.Event(), threading.Event(), custom_losses._write
        session.may_read.set()

        def late(file: Path, note: Any) -> None:
            writing.set()
            assert may_write.wait(30)
            write(file, note)

        monkeypatch.setattr(custom_losses, "_write", late)
        made = asyncio.create_task(session.create())
        await asyncio.to_thread(writing.wait, 30)
        session.end_session()
        may_write.set()
        assert (await made)["error"] == "session s is over"
        assert not session.losses._made
        assert not [*tmp_path.iterdir()]

    run(tmp_path, scenario)


def test_losses_that_are_asked_for_at_once_are_as_many_as_a_session_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_losses, "MOST_CUSTOM_LOSSES", 2)

    async def scenario(session: Losses) -> None:
        made = [asyncio.create_task(session.create(number)) for number in range(3)]
        await asyncio.to_thread(session.reading.wait, 30)
        session.may_read.set()
        answers = await asyncio.gather(*made)
        assert [answer["error"] for answer in answers if "error" in answer] == [
            "the session has 2 losses already, as many as it may have"
        ]
        assert len(session.losses._made) == len([*tmp_path.iterdir()]) == 2

    run(tmp_path, scenario)


def test_a_loss_that_cannot_be_written_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(session: Losses) -> None:
        session.may_read.set()

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(custom_losses, "_write", full)
            with pytest.raises(RequestError, match="cannot write down the loss now; ask again") as raised:
                await session.create()
        assert raised.value.status == 503
        assert not session.losses._made
        assert (await session.create())["type"] == "create_custom_loss"

    run(tmp_path, scenario)
