"""The common part of engines on an SGLang server, whoever runs the server: responses over HTTP, weights with a version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.models.adapters import adapter_part
from megarl.rollout.engines.capacity import EngineCapacity
from megarl.rollout.engines.protocol import Engine, EngineRequest, Generation, check_version
from megarl.rollout.engines.sglang.answered import AnsweredColumn
from megarl.rollout.engines.sglang.client import AskedServer, SglangClient
from megarl.weights.weight_state import WeightState


class ServedEngine(Engine):
    """An engine that asks `server`; `initial_version` is that of the weights it serves (None: not known)."""

    def __init__(
        self,
        server: AskedServer,
        initial_version: int | None = None,
        media_folder: Path | None = None,
        columns: Sequence[AnsweredColumn] = (),
        *,
        adds_adapters: bool = False,
        tokenizer_folder: str | None = None,
    ) -> None:
        """`media_folder` has the pictures that prompts show; the server must see it, too. `columns`: those of options that
        it answers.

        `adds_adapters`: every request must say of which version the adapters are that it is to be answered with.
        `tokenizer_folder`: that of a server which ends responses at stop texts.
        """
        self._weights = WeightState(initial_version)
        self._client = SglangClient(server, columns, media_folder, tokenizer_folder)
        if adds_adapters:
            client = adapter_part("sglang_client")
            self._client = client.AdapterClient(server, client.name_by(self._weights), columns, media_folder, tokenizer_folder)

    @property
    def weight_version(self) -> int | None:
        return self._weights.version

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        return await self._client.generate(request, check_version(self.weight_version))

    async def cut(self, keys: Sequence[str]) -> None:
        await self._client.cut(keys)

    async def capacity(self) -> EngineCapacity:
        return await self._client.capacity()

    async def take_ended(self) -> list[str]:
        return await self._client.ended.take()

    async def abandon_update(self) -> None:
        # sampling stays paused, and an update that the server has begun stays open, until the next one
        self._weights.fail()

    async def health(self) -> None:
        await self._client.health()

    async def _serve(self, version: int) -> None:
        """Have the server answer under the weights of `version`, which are all there."""
        await self._client.take_version(version)
        self._weights.confirm()
        await self._client.resume()

    @contextlib.contextmanager
    def _losing_weights_on_error(self) -> Iterator[None]:
        """Whatever is raised inside leaves the engine without weights of a known version."""
        try:
            yield
        except BaseException:
            self._weights.lose()
            raise
