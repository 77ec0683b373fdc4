"""Requests to a server that adds adapters: each names those that it is to be answered with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from megarl.errors import EngineError
from megarl.models.adapters import served_name
from megarl.rollout.engines.sglang.client import AskedServer, BadRequest, SglangClient, json_object
from megarl.weights.weight_state import WeightState


class AdapterClient(SglangClient):
    """A client whose requests name the adapters of their answer."""

    def __init__(self, server: AskedServer, name_of: Callable[[], str | None], *further: Any) -> None:
        """`name_of` says what the server calls the adapters to answer with now; None: it has none. `further` as
        `SglangClient` takes it."""
        super().__init__(server, *further)
        self._name_of = name_of

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
        """Ask again under the new name where an update changed it before the server had taken the request."""
        while True:
            name = self._name_of()
            try:
                return await super()._ask(session, body | ({"lora_path": name} if name is not None else {}))
            except BadRequest:
                if self._name_of() == name:
                    raise


async def load_adapters(client: SglangClient, adapters: Mapping[str, Any]) -> None:
    """Have the server load adapters, given as the body of the request."""
    endpoint = "load_lora_adapter_from_tensors"
    answer = json_object(await client.control(endpoint, {**adapters}), f"{client.server.url}/{endpoint}")
    if not answer.get("success"):
        raise EngineError(f"{client.server.url} did not make room for adapters: {answer.get('error_message')}")


def name_by(weights: WeightState) -> Callable[[], str | None]:
    """The server's name for the adapters that a request is to be answered with: a held one, with those that come."""

    def name_of() -> str | None:
        version = weights.version if weights.updating is None else weights.updating
        return served_name(version) if version is not None else None

    return name_of
