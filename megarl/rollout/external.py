"""An SGLang server that somebody else started, somewhere: asked for responses by its URL, given weights as a folder.

It needs nothing of megarl's: no loader, no process group, only the folder on a file system that it can read. What it has read
cannot be compared with what was written.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from megarl.bearer import bearer
from megarl.errors import EngineError
from megarl.models.registry import load_hf_config
from megarl.rollout.checksums import EngineLayout
from megarl.rollout.engine import Bucket
from megarl.rollout.same_model import ModelFacts, check_same_model
from megarl.rollout.sglang_engine import CONTROL_TIMEOUT_S, SglangEngine

ASK_S = 10.0
POLL_S = 0.5


class ExternalServer:
    """What an engine asks of its server, for one whose process is not ours."""

    pid = None
    alive = True
    """Nobody here knows; whether it answers is seen when it is asked."""

    def __init__(self, url: str, token: str | None, deadline_s: float) -> None:
        self.url, self.token, self.deadline_s = url.rstrip("/"), token or "", deadline_s

    @property
    def headers(self) -> dict[str, str]:
        """What every request to the server must bring."""
        return bearer(self.token or None)

    def obituary(self) -> str:
        """What is known of its end."""
        return f"the SGLang server at {self.url} is not this run's; look at its own log"

    def start(self) -> None:
        """Wait until it answers; raises EngineError if it does not within the deadline."""
        ends_at = time.monotonic() + self.deadline_s
        while True:
            try:
                self.ask("model_info")  # unlike `health` it is answered while an update is open
                return
            except EngineError:
                if time.monotonic() > ends_at:
                    raise
            time.sleep(POLL_S)

    def stop(self) -> None:
        """It goes on: whoever started it ends it."""

    def ask(self, path: str) -> Any:
        """The answer to a GET, None if it is empty; raises EngineError."""
        url = f"{self.url}/{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=self.headers), timeout=ASK_S) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            hint = "; its --api-key goes into MEGARL_ENGINE_TOKEN" if error.code == 401 else ""
            raise EngineError(f"rollout.engine_args.urls: {url} answered {error.code}{hint}") from error
        except (OSError, ValueError) as error:
            raise EngineError(f"rollout.engine_args.urls: {url} did not answer: {error}") from error


class ExternalEngine(SglangEngine):
    """The engine protocol on such a server. Made by `await ExternalEngine.at(...)`; of its weights no version is known."""

    server: ExternalServer  # type: ignore[assignment]

    @classmethod
    async def at(cls, url: str, token: str | None, trainer: ModelFacts, deadline_s: float) -> ExternalEngine:
        """The server at `url`, once it answers.

        Raises:
            EngineError: it does not answer within `deadline_s`, or serves another model than the trainer's.
        """
        server = ExternalServer(url, token, deadline_s)
        await asyncio.to_thread(server.start)
        facts = await asyncio.to_thread(server.ask, "server_info")
        path, dtype = facts.get("model_path"), facts.get("dtype")
        serves = ModelFacts(load_hf_config(path), trainer.dtype if dtype in (None, "auto") else dtype)
        try:
            check_same_model(serves, trainer)
        except EngineError as error:
            raise EngineError(f"rollout.engine_args.urls: {url}: {error}") from error
        if not facts.get("skip_tokenizer_init"):
            raise EngineError(
                f"rollout.engine_args.urls: {url} must be started with --skip-tokenizer-init: it is sent token ids"
            )
        return cls(server, EngineLayout(trainer))  # type: ignore[arg-type]

    async def begin_update(self, version: int, base: int | None = None) -> None:
        self._weights.begin(version, base)
        with self._failing():
            await self._control("pause_generation", {"mode": "retract"})

    async def apply_update(self, bucket: Bucket) -> None:
        raise EngineError(f"{self.server.url} takes weights as a folder; rollout.sync may be 'disk'")

    async def load_update(self, folder: str) -> None:
        """Have the server read its weights from the Hugging Face folder `folder`."""
        self._weights.receive()
        await self._control("update_weights_from_disk", {"model_path": folder, "flush_cache": False})

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None = None) -> None:
        self._weights.check(version)
        with self._failing():
            async with self._session(CONTROL_TIMEOUT_S) as session:
                await self._serve(session, version)

    async def restart(self) -> None:
        """Wait until it answers again; the weights then have no known version."""
        self._weights.lose()
        await asyncio.to_thread(self.server.start)

    async def sleep(self) -> None:
        raise EngineError(f"{self.server.url} is not this run's to put to sleep")
