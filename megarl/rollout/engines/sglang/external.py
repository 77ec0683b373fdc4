"""An SGLang server that somebody else started, somewhere: asked for responses by its URL, given weights as a folder.

It needs nothing of megarl's: no loader, no process group, only the folder on a file system that it can read. What it has read
cannot be compared with what was written.
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from megarl.config import Config
from megarl.config.engine_kinds import RUNNING_SGLANG
from megarl.config.secrets import bearer
from megarl.errors import EngineError
from megarl.models.registry import load_hf_config
from megarl.rollout.engines.protocol import EnginePlace
from megarl.rollout.engines.sglang.answered import answered_columns
from megarl.rollout.engines.sglang.piece_client import PieceClient
from megarl.rollout.engines.sglang.served import ServedEngine
from megarl.system.http_requests import AnswerError, open_url, parsed, read_answer
from megarl.weights.model_compatibility import ServedModel, check_same_model

ASK_S = 10.0
POLL_S = 0.5


class ExternalServer:
    """Answers to an engine about its server, for one whose process is not ours."""

    alive = True
    """Nobody here knows; whether it answers is seen when it is asked."""

    def __init__(self, url: str, token: str | None, deadline_s: float) -> None:
        self.url, self.token, self.deadline_s = url.rstrip("/"), token or "", deadline_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request to the server."""
        return bearer(self.token or None)

    def exit_report(self) -> str:
        """Describe what is known of its end."""
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

    def ask(self, path: str) -> Any:
        """The answer to a GET, None if it is empty; raises EngineError."""
        url = f"{self.url}/{path}"
        try:
            with open_url(urllib.request.Request(url, headers=self.headers), ASK_S) as answer:
                return parsed(read_answer(answer) or b"null")
        except urllib.error.HTTPError as error:
            hint = "; its --api-key goes into MEGARL_ENGINE_TOKEN" if error.code == 401 else ""
            raise EngineError(f"rollout.servers.urls: {url} answered {error.code}{hint}") from error
        except AnswerError as error:
            raise EngineError(f"rollout.servers.urls: {url} {error}") from None
        except (OSError, HTTPException) as error:
            raise EngineError(f"rollout.servers.urls: {url} did not answer: {error}") from error


class ExternalEngine(ServedEngine):
    """The engine on such a server. Made by `await ExternalEngine.start(...)`, or `at`; of its weights no version is known."""

    capabilities = RUNNING_SGLANG

    @classmethod
    def options(cls, config: Config, place: EnginePlace) -> dict[str, Any]:
        return {
            "url": config.rollout.servers.urls[place.number],
            "token": os.environ.get("MEGARL_ENGINE_TOKEN"),
            "dtype": config.model.dtype,
            "deadline_s": config.resources.deadlines.start_s,
        }

    @classmethod
    async def start(cls, model_path: str, *, initial_version: int | None = None, **options: Any) -> ExternalEngine:
        """The server once it answers; also when it had to be started again by whoever started it."""
        trainer = ServedModel(load_hf_config(model_path), options.pop("dtype"))
        return await cls.at(trainer=trainer, tokenizer_folder=model_path, **options)

    @classmethod
    async def at(
        cls, url: str, token: str | None, trainer: ServedModel, deadline_s: float, tokenizer_folder: str | None = None
    ) -> ExternalEngine:
        """The server at `url`, once it answers. `tokenizer_folder`: of the tokenizer by which stop texts are found; None: they
        are not looked for.

        Raises:
            EngineError: it does not answer within `deadline_s`, or serves another model than the trainer's.
        """
        server = ExternalServer(url, token, deadline_s)
        await asyncio.to_thread(server.start)
        facts = await asyncio.to_thread(server.ask, "server_info")
        if not isinstance(facts, dict) or not isinstance(facts.get("model_path"), str):
            raise EngineError(f"rollout.servers.urls: {url}/server_info names no model_path, but says {str(facts)[:200]!r}")
        path, dtype = facts["model_path"], facts.get("dtype")
        serves = ServedModel(load_hf_config(path), trainer.dtype if dtype in (None, "auto") else dtype)
        try:
            check_same_model(serves, trainer)
        except EngineError as error:
            raise EngineError(f"rollout.servers.urls: {url}: {error}") from error
        if not facts.get("skip_tokenizer_init"):
            raise EngineError(f"rollout.servers.urls: {url} must be started with --skip-tokenizer-init: it is sent token ids")
        engine = cls(server, columns=answered_columns(path, {}))
        if tokenizer_folder is not None:
            engine._client = PieceClient(server, answered_columns(path, {}), tokenizer_folder)
        return engine

    async def begin_update(self, version: int, base: int | None = None) -> None:
        self._weights.begin(version, base)
        with self._losing_weights_on_error():
            await self._client.pause()

    async def load_update(self, folder: str) -> None:
        self._weights.receive()
        await self._client.control("update_weights_from_disk", {"model_path": folder, "flush_cache": False})

    async def end_update(self, version: int, checksums: Mapping[Any, str] | None = None) -> None:
        self._weights.check(version)
        with self._losing_weights_on_error():
            await self._serve(version)

    async def stop(self) -> None:
        """The server goes on; this engine has no weights from here on."""
        self._weights.lose()
