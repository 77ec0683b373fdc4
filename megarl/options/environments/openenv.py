"""An environment of an OpenEnv server (github.com/meta-pytorch/OpenEnv), over its WebSocket: one session for each episode.

The protocol is that of `openenv-core` 0.3: messages `reset`, `step` and `close`, answered by observations with reward and done.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import aiohttp

from megarl.data.sample import Prompt
from megarl.options.environments.section import OpenEnvConfig

MAX_MESSAGE_BYTES = 100 << 20
"""As the package's own client."""
REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of errors that are about an action, which the policy is told."""


class OpenEnvError(Exception):
    """The server does not do what it is asked."""


class OpenEnvironment:
    """One episode, as `in_environment` runs it."""

    def __init__(self, settings: OpenEnvConfig) -> None:
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, prompt: Prompt) -> str:
        """Begin an episode: the same one for all episodes of a group, where the environment heeds its seed.

        Raises:
            OpenEnvError: the server cannot be reached, or refuses.
        """
        settings, headers = self._settings, {}
        if settings.token_env is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(settings.token_env, '')}"
        self._http = aiohttp.ClientSession(headers=headers, trace_configs=[_without_redirects()])
        address = settings.url.rstrip("/").replace("http", "ws", 1) + "/ws"
        try:
            self._socket = await self._http.ws_connect(address, max_msg_size=MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise OpenEnvError(f"{settings.url} (rollout.episode.openenv.url) cannot be reached: {error}") from None
        arguments = prompt.row.get(settings.reset_key) if settings.reset_key is not None else {}
        if not isinstance(arguments, dict):
            raise OpenEnvError(f"'{settings.reset_key}' of row {prompt.row_id} must be an object of arguments for reset")
        answer = await self._ask({"type": "reset", "data": {"seed": zlib.crc32(prompt.row_id.encode()), **arguments}})
        return self._told(answer)

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Act by what the policy said. An action that the server refuses is told to the policy, and earns nothing.

        Raises:
            OpenEnvError: the connection ended, or the environment failed.
        """
        if self._settings.action_key is not None:
            action: Any = {self._settings.action_key: text}
        else:
            try:
                action = json.loads(text)
            except (ValueError, RecursionError) as error:
                return f"error: an action must be a JSON object: {error}", 0.0, False
            if not isinstance(action, dict):
                return "error: an action must be a JSON object", 0.0, False
        answer = await self._ask({"type": "step", "data": action})
        if answer["type"] == "error":
            return f"error: {answer['data'].get('message', 'the action is refused')}", 0.0, False
        data = answer["data"]
        return self._told(answer), float(data.get("reward") or 0.0), bool(data.get("done"))

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        try:
            await self._socket.send_json(message)
            answer = await self._socket.receive_json()
        except (TypeError, ValueError, ConnectionError) as error:
            raise OpenEnvError(f"the server ended the session in {message['type']}: {error}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise OpenEnvError(f"the server answered {message['type']} with {str(answer)[:200]}, which is no observation")
        if answer.get("type") == "error":
            code = answer["data"].get("code")
            if message["type"] != "step" or code not in REFUSED:
                hint = "; lower rollout.episode.openenv.at_once" if code == "CAPACITY_REACHED" else ""
                raise OpenEnvError(f"the server refused {message['type']}: {answer['data'].get('message')} ({code}){hint}")
        elif not isinstance(answer["data"].get("observation"), dict):
            raise OpenEnvError(f"the server answered {message['type']} with {str(answer)[:200]}, which is no observation")
        return answer

    def _told(self, answer: dict[str, Any]) -> str:
        """A field of the observation, if the config names one or it has only one text, else all of it as JSON."""
        observation: dict[str, Any] = answer["data"]["observation"]
        key = self._settings.observation_key
        if key is not None:
            if key not in observation:
                raise OpenEnvError(
                    f"an observation has no '{key}' (rollout.episode.openenv.observation_key); it has {', '.join(observation)}"
                )
            value = observation[key]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(observation) == 1:
            [only] = observation.values()
            if isinstance(only, str):
                return only
        return json.dumps(observation, ensure_ascii=False)


def _without_redirects() -> aiohttp.TraceConfig:
    """What refuses to be led to another server, which would get what is said in the episode."""

    async def refuse(session: Any, context: Any, params: aiohttp.TraceRequestRedirectParams) -> None:
        location = params.response.headers.get("Location", "")
        raise OpenEnvError(f"{params.url} names '{location[:200]}' instead, which is not followed")

    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(refuse)
    return tracing
