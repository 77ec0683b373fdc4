"""HTTP to a server that decodes and to those that prefill for it: both are sent each request, and answer it together.

Knows no weights and starts no server. A server that decodes asks the one that prefills for the prompt's keys and values by the
room that a request names (SGLang 0.5.23: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import aiohttp

from megarl.config.secrets import bearer
from megarl.errors import EngineError
from megarl.rollout.engines.protocol import EngineRequest, Generation
from megarl.rollout.engines.sglang.asked_prompt import AskedPrompt
from megarl.rollout.engines.sglang.client import (
    CONTROL_TIMEOUT_S,
    POLL_S,
    AskedServer,
    BadRequest,
    GenerateCall,
    SglangClient,
    json_object,
)

ROOM_BITS = 63
"""Bits of the number by which two servers know that they work on one request."""
BLAME_S = 2.0
"""After decoding has failed, for the server that prefilled to show that it is the cause."""
_conversation: ContextVar[str | None] = ContextVar("conversation", default=None)


@dataclass(frozen=True)
class PrefillServer:
    """A server that prefills, with weights of `version`: how it is reached, and where others ask for what it computed."""

    number: int
    version: int
    url: str
    token: str
    bootstrap_host: str
    bootstrap_port: int

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of every request to it."""
        return bearer(self.token)


@dataclass
class GroupPrefill:
    """The prompt that responses of a group share: the first request has it computed, the others then find it cached."""

    name: str
    is_begun: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Pending:
    """One response under way: the name of the request that is at both servers now, and which one prefills for it."""

    group: GroupPrefill
    sent: str = ""
    server: PrefillServer | None = None
    is_paused: bool = False
    is_cut: bool = False


def nothing_sampled() -> dict[str, Any]:
    """The answer to a request that was stopped before there was a token."""
    return {"output_ids": [], "meta_info": {"output_token_logprobs": [], "finish_reason": {"type": "abort"}}}


class PrefillClient(SglangClient):
    """A server that prefills, as its own engine asks it; others send it requests."""

    async def pause(self) -> None:
        """Give up what is under way, which servers that decode have given up before, and take nothing up."""
        await self.abort_all()
        await self.wait_until_idle()
        await super().pause()


class DecodeClient(SglangClient):
    """A server that decodes. A response that an update interrupts is asked for again behind its tokens: their keys and values
    are computed by the server that prefills, under the new weights."""

    def __init__(self, server: AskedServer, version: Callable[[], int | None], *arguments: Any) -> None:
        """`version` tells that of the server's weights. `arguments` are those of `SglangClient`."""
        super().__init__(server, *arguments)
        self._version = version
        self._servers: tuple[PrefillServer, ...] = ()
        self._pending: dict[str, Pending] = {}
        self._is_open, self._changed = True, asyncio.Event()
        self._attempts = itertools.count()

    def meet(self, servers: Iterable[PrefillServer]) -> None:
        """From now on these prefill, whichever have the weights' version."""
        self._servers = tuple(servers)
        self._wake()

    def _wake(self) -> None:
        """Have whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(self, request: EngineRequest, version: int) -> list[list[Generation]]:
        _conversation.set(request.conversation)
        return await super().generate(request, version)

    async def _group(
        self, call: GenerateCall, prompt: AskedPrompt, ids: Sequence[str], begun: Sequence[Generation | None]
    ) -> list[Generation]:
        """All samples of one prompt, prefilled by one server: turns of a conversation by that of its first prompt."""
        conversation, key = _conversation.get(), self._under_way.get(ids[0], ids[0])
        group = GroupPrefill(conversation.rpartition("/")[0] if conversation is not None else key)
        self._pending |= {rid: Pending(group) for rid in ids}
        try:
            return list(await asyncio.gather(*(self._sample(call, prompt, *one) for one in zip(ids, begun, strict=True))))
        finally:
            for rid in ids:
                del self._pending[rid]

    async def _response(
        self, call: GenerateCall, prompt: AskedPrompt, rid: str, begun: Generation | None, most: int | None = None
    ) -> Generation:
        pending = self._pending[rid]
        while True:
            generation = await super()._response(call, prompt, rid, begun, most)
            if generation.finish_reason != "abort" or not pending.is_paused or pending.is_cut:
                return generation
            pending.is_paused, begun = False, generation

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, of both servers."""
        pending = self._pending[body["rid"]]
        while (server := await self._server_of(pending)) is not None:
            answer = await self._both(session, body, pending, server)
            if answer is not None:
                return answer
        return nothing_sampled()

    async def _server_of(self, pending: Pending) -> PrefillServer | None:
        """The server that is to prefill for a response, once there is one; None: the response was cut."""
        group = pending.group
        while not pending.is_cut:
            able = [server for server in self._servers if server.version == self._version()]
            if not self._is_open or not able:
                await self._changed.wait()
            elif group.is_begun and not group.done.is_set():
                await group.done.wait()
            else:
                group.is_begun = True
                return able[crc32(group.name.encode()) % len(able)]
        return None

    async def _both(
        self, session: aiohttp.ClientSession, body: dict[str, Any], pending: Pending, server: PrefillServer
    ) -> dict[str, Any] | None:
        """The answer of both servers; None: the one that prefills has failed, or other weights."""
        sent = body | {
            "rid": f"{body['rid']}-{next(self._attempts)}",
            "bootstrap_host": server.bootstrap_host,
            "bootstrap_port": server.bootstrap_port,
            "bootstrap_room": secrets.randbits(ROOM_BITS),
        }
        pending.sent, pending.server = sent["rid"], server
        prefilling = asyncio.ensure_future(self._prefill(session, sent, server, pending.group))
        decoding = asyncio.ensure_future(super()._ask(session, sent))
        both = (prefilling, decoding)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            if not all(task.done() for task in both):
                if decoding.done():
                    await asyncio.wait([prefilling], timeout=BLAME_S)
                await self._stop(pending)
                await asyncio.wait(both)
        except BaseException:
            for task in both:
                task.cancel()
            await asyncio.shield(self._stop(pending))
            raise
        finally:
            stopped, pending.sent, pending.server = pending.is_paused or pending.is_cut, "", None
        return self._answer(prefilling, decoding, server, stopped=stopped)

    def _answer(
        self,
        prefilling: asyncio.Future[dict[str, Any]],
        decoding: asyncio.Future[dict[str, Any]],
        server: PrefillServer,
        *,
        stopped: bool,
    ) -> dict[str, Any] | None:
        """The answer that both made, as `_both` returns it. `stopped`: it was stopped on purpose."""
        refused = next((error for task in (prefilling, decoding) if isinstance(error := task.exception(), BadRequest)), None)
        if refused is not None:
            raise refused
        if decoding.exception() is None and prefilling.exception() is None:
            prefilled, decoded = prefilling.result(), decoding.result()
            if same_version(prefilled, decoded):
                return joined(prefilled, decoded)
        if stopped:
            return nothing_sampled()
        if prefilling.exception() is None and decoding.exception() is not None:
            raise decoding.exception() or AssertionError
        self._servers = tuple(other for other in self._servers if other != server)  # until the driver names it again
        return None

    async def _prefill(
        self, session: aiohttp.ClientSession, body: dict[str, Any], server: PrefillServer, group: GroupPrefill
    ) -> dict[str, Any]:
        """The answer of the server that prefills; whoever waits for the group's prompt goes on then."""
        try:
            answer = await self._post_to(server, session, "generate", body)
            return json_object(answer, f"{server.url}/generate")
        finally:
            group.done.set()

    async def _post_to(self, server: PrefillServer, session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]) -> Any:
        url = f"{server.url}/{endpoint}"
        try:
            async with session.post(url, json=body, headers=server.headers, allow_redirects=False) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                refused = BadRequest if response.status == 400 else EngineError
                raise refused(f"{url} answered {response.status}: {(await response.text())[:1000]}")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(f"{url} did not answer: {error}") from error

    # ends ---------------------------------------------------------------------------------------------------------

    async def _stop(self, pending: Pending) -> None:
        """Have both servers stop their work on a response; one that is gone has stopped already."""
        sent, server = pending.sent, pending.server
        if not sent or server is None:
            return
        await super()._abort([sent])
        with contextlib.suppress(EngineError, TimeoutError):
            async with self._session(10.0) as session:
                await self._post_to(server, session, "abort_request", {"rid": sent})

    async def _abort(self, ids: Iterable[str]) -> None:
        await asyncio.gather(*(self._stop(self._pending[rid]) for rid in ids if rid in self._pending))

    async def cut(self, keys: Sequence[str]) -> None:
        chosen = {*keys}
        for rid, key in self._under_way.items():
            if key in chosen and rid in self._pending:
                self._pending[rid].is_cut = True
        self._wake()
        await super().cut(keys)

    async def pause(self) -> None:
        """Stop sampling; responses under way are cut, and wait here to go on."""
        self._is_open = False
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            while at_servers := [pending for pending in self._pending.values() if pending.sent]:
                for pending in at_servers:
                    pending.is_paused = True
                await asyncio.gather(*map(self._stop, at_servers))
                await asyncio.sleep(POLL_S)
        await self.wait_until_idle()
        await super().pause()

    async def resume(self) -> None:
        await super().resume()
        self._is_open = True
        self._wake()


def same_version(prefilled: Mapping[str, Any], decoded: Mapping[str, Any]) -> bool:
    """Return whether both servers answered with weights of one version, as far as they say."""
    versions = {answer["meta_info"].get("weight_version") for answer in (prefilled, decoded) if "meta_info" in answer}
    return len(versions) == 1


def joined(prefilled: Mapping[str, Any], decoded: Mapping[str, Any]) -> dict[str, Any]:
    """The decoding server's answer with what the other one knows: of the prompt what was cached, and which experts it chose.

    Log-probs are the decoding server's: it has been sent the first token's, too. An answer that was stopped has as many tokens
    as it has log-probs of.
    """
    had, info = prefilled["meta_info"], dict(decoded["meta_info"])
    ids = decoded.get("output_ids") or []
    if (info.get("finish_reason") or {}).get("type") == "abort":
        info["output_token_logprobs"] = info.get("output_token_logprobs") or []
        ids = ids[: len(info["output_token_logprobs"])]
    if "cached_tokens" in had:
        info["cached_tokens"] = had["cached_tokens"]
    if had.get("routed_experts") is not None and info.get("routed_experts") is not None:
        of_prompt, whole = (base64.b64decode(part["routed_experts"]) for part in (had, info))
        info["routed_experts"] = base64.b64encode(of_prompt + whole[len(of_prompt) :]).decode()
    return {**decoded, "output_ids": ids, "meta_info": info}
