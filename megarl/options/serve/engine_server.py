"""One SGLang server behind an engine, over HTTP: requests by bodies, adapters by name, and what happens when it is lost.

A server that is started again has another token, no adapters, and perhaps another address; adapters are loaded again before it
is asked with them. Used in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from megarl.config.secrets import bearer
from megarl.errors import DeadlineError, EngineError, WorkerError
from megarl.options.serve.asked_bodies import EngineBody
from megarl.options.serve.values import RequestError
from megarl.system.http_requests import AnswerError, parsed, read_unpacked, shortened

ANSWER_S = 15.0
"""For an engine's process to say where its server is, and how it is."""
ADAPTER_S, WEIGHTS_S = 300.0, 3600.0
"""For a server to load adapters, or all weights."""
ABORT_S = CONNECT_S = 10.0
PAUSE_S = 10.0
"""Between two tries to start a server that do not succeed."""
MOST_ANSWER_BYTES = 1 << 30


class ServerLostError(EngineError):
    """A server did not answer, or is another one than the one that was asked."""


@dataclass(frozen=True)
class Address:
    """The address of a server, and the secret that it wants to see in every request: new at each start."""

    url: str
    token: str = field(repr=False)


class AskedEngine(Protocol):
    """The part of `EngineCalls` that is needed here. All raise WorkerError, EngineError or DeadlineError."""

    async def endpoint(self, deadline_s: float) -> Any:
        """The `ServerEndpoint` of its server; None: it has none."""
        ...

    async def health(self, *, deadline_s: float) -> None:
        """Return if the server is able to answer."""
        ...

    async def restart(self, deadline_s: float) -> None:
        """Start its server anew."""
        ...


@dataclass(eq=False)
class NamedAdapter:
    """A PEFT folder under a name of its own, which no other folder ever has in a server."""

    name: str
    folder: Path
    users: int = 0
    """Requests that use it, on all servers."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Held:
    """An adapter in a server: the work of loading it, and the requests there that use it."""

    loading: asyncio.Task[None]
    users: int = 0


class EngineServer:
    """The server of an engine. `load` counts samples that it works on."""

    pause_s = PAUSE_S

    def __init__(
        self, engine: AskedEngine, number: int, http: Callable[[], aiohttp.ClientSession], most_adapters: int, restart_s: float
    ) -> None:
        """`most_adapters`: how many it holds, at least 1. `restart_s`: for one start of the server."""
        self.engine, self.number, self.load = engine, number, 0
        self._http, self._most_adapters, self._restart_s = http, most_adapters, restart_s
        self._address: Address | None = None
        self._last: Address | None = None
        """The server that `_held` is of."""
        self._finding: asyncio.Task[Address] | None = None
        self._not_before = 0.0
        self._held: OrderedDict[NamedAdapter, _Held] = OrderedDict()
        self._making_room = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Return whether it answered when it was asked last."""
        return self._address is not None

    def has(self, adapter: NamedAdapter | None) -> bool:
        """Return whether it need not load this adapter first."""
        return adapter is None or adapter in self._held

    # requests -----------------------------------------------------------------------------------------------------

    async def generate(self, body: EngineBody) -> Any:
        """The server's answer, a list of them to a body of several requests.

        Raises:
            RequestError: it refuses the request.
            ServerLostError: it did not answer.
            EngineError: it failed.
        """
        return await self._post("generate", body, None)

    async def abort(self, names: Sequence[str]) -> None:
        """Stop the work on requests that nobody waits for any more; a lost server has stopped already."""
        if self._address is not None:
            with contextlib.suppress(EngineError, RequestError):
                await asyncio.gather(*(self._post("abort_request", {"rid": name}, ABORT_S) for name in names))

    # adapters -----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def holding(self, adapter: NamedAdapter | None) -> AsyncIterator[str | None]:
        """Within it the server holds the adapter; yields the server's name of it.

        Raises:
            RequestError: SGLang refuses the folder.
            ServerLostError: the server did not answer.
        """
        if adapter is None:
            yield None
            return
        held = await self._hold(adapter)
        try:
            yield adapter.name
        finally:
            held.users -= 1
            self._freed.set()

    async def _hold(self, adapter: NamedAdapter) -> _Held:
        while (held := self._held.get(adapter)) is None:
            async with self._making_room:
                if adapter not in self._held:
                    await self._make_room()
                    self._held[adapter] = _Held(asyncio.create_task(self._load(adapter)))
                    self._held[adapter].loading.add_done_callback(_retrieved)
        self._held.move_to_end(adapter)
        held.users += 1
        try:
            await asyncio.shield(held.loading)
        except BaseException as error:
            held.users -= 1
            if not isinstance(error, asyncio.CancelledError) and self._held.get(adapter) is held:
                del self._held[adapter]
            self._freed.set()
            raise
        return held

    async def _make_room(self) -> None:
        """Drop the least recently used adapters that no request uses, until there is room for one more."""
        while len(self._held) >= self._most_adapters:
            unused = next((one for one, held in self._held.items() if not held.users and held.loading.done()), None)
            if unused is None:
                self._freed.clear()
                await self._freed.wait()
            else:
                await self._unload(unused)

    async def _load(self, adapter: NamedAdapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        try:
            await self._post("load_lora_adapter", body, ADAPTER_S)
        except RequestError as error:
            if "already loaded" not in str(error):  # by a request whose answer was lost
                raise
        finally:
            self._freed.set()

    async def _unload(self, adapter: NamedAdapter) -> None:
        held = self._held.pop(adapter, None)
        if held is not None and self._address is not None:
            with contextlib.suppress(RequestError):  # it has none of this name
                await self._post("unload_lora_adapter", {"lora_name": adapter.name}, ADAPTER_S)

    async def forget(self, adapter: NamedAdapter) -> None:
        """Drop an adapter that no request uses any more."""
        held = self._held.get(adapter)
        if held is not None:
            with contextlib.suppress(EngineError, RequestError):  # a lost server, or one that did not load it, has none
                await asyncio.shield(held.loading)
                await self._unload(adapter)
            self._held.pop(adapter, None)
            self._freed.set()

    # the server ---------------------------------------------------------------------------------------------------

    def find(self) -> asyncio.Task[Address]:
        """The work of finding the server, and of starting it again if it is not well.

        Its result is the address; ServerLostError: there is none now.
        """
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._find())
            self._finding.add_done_callback(_retrieved)
        return self._finding

    async def _find(self) -> Address:
        await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
        try:
            if self._last is not None:
                try:
                    await self.engine.health(deadline_s=ANSWER_S)
                except (EngineError, WorkerError, DeadlineError):
                    await self.engine.restart(self._restart_s)
            endpoint = await self.engine.endpoint(ANSWER_S)
            if endpoint is None:
                raise EngineError("it has no server that can be asked directly")
        except (EngineError, WorkerError, DeadlineError) as error:
            self._not_before = time.monotonic() + self.pause_s
            raise ServerLostError(f"engine {self.number} is lost: {error}") from error
        address = Address(endpoint.url, endpoint.token)
        if address != self._last:
            self._held, self._last = self._held_at_start(), address
            self._freed.set()
        self._address = address
        return address

    def _held_at_start(self) -> OrderedDict[NamedAdapter, _Held]:
        """Return the adapters of a server that was just started."""
        return OrderedDict()

    def _lose(self, address: Address) -> None:
        """Have the server found again, unless it was already."""
        if self._address is address:
            self._address = None

    async def stop(self) -> None:
        """Cancel what is under way on the server itself."""
        tasks: list[asyncio.Task[Any]] = [held.loading for held in self._held.values()]
        tasks += [self._finding] if self._finding is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _post(self, endpoint: str, body: EngineBody, timeout_s: float | None) -> Any:
        address = self._address
        if address is None:
            raise ServerLostError(f"engine {self.number} was lost")
        url = f"{address.url}/{endpoint}"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._http().post(
                url, json=body, headers=bearer(address.token), timeout=timeout, allow_redirects=False
            ) as response:
                answer = await read_unpacked(response, MOST_ANSWER_BYTES)
            status, is_json = response.status, response.content_type == "application/json"
            if status == HTTPStatus.OK:
                return parsed(answer) if is_json else None
        except aiohttp.ClientError as error:
            self._lose(address)
            raise ServerLostError(f"{url} did not answer: {error!r}") from error
        except TimeoutError as error:
            raise EngineError(f"{url} did not answer within {timeout_s:g} s") from error
        except AnswerError as error:
            raise EngineError(f"{url} {error}") from None
        said = _sentence(answer)
        if status == HTTPStatus.BAD_REQUEST:
            raise RequestError(f"the engines refuse the request: {said}")
        if status == HTTPStatus.UNAUTHORIZED:  # another server has its port
            self._lose(address)
            raise ServerLostError(f"{url} is another server")
        raise EngineError(f"{url} answered {status}: {said}")


class WholeServer(EngineServer):
    """One that samples with all weights of one model folder at a time; adapters here are such folders, `base` the first.

    Requests for other weights wait until those before them are answered, so that no stream of requests keeps others out.
    """

    def __init__(
        self, engine: AskedEngine, number: int, http: Callable[[], aiohttp.ClientSession], base: NamedAdapter, restart_s: float
    ) -> None:
        super().__init__(engine, number, http, 1, restart_s)
        self._base, self._turn = base, asyncio.Lock()

    @contextlib.asynccontextmanager
    async def holding(self, adapter: NamedAdapter | None) -> AsyncIterator[str | None]:
        """Within it the server samples with the folder's weights; yields no name, as there are no adapters beside them."""
        async with super().holding(adapter or self._base):
            yield None

    async def _hold(self, adapter: NamedAdapter) -> _Held:
        async with self._turn:
            return await super()._hold(adapter)

    async def _load(self, adapter: NamedAdapter) -> None:
        try:
            await self._post("update_weights_from_disk", {"model_path": str(adapter.folder)}, WEIGHTS_S)
        finally:
            self._freed.set()

    async def _unload(self, adapter: NamedAdapter) -> None:
        self._held.pop(adapter, None)

    def _held_at_start(self) -> OrderedDict[NamedAdapter, _Held]:
        return OrderedDict({self._base: _Held(asyncio.create_task(asyncio.sleep(0)))})


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Take a task's exception, which nobody may wait for any more."""
    if not task.cancelled():
        task.exception()


def _sentence(answer: bytes) -> str:
    """The message of an error that SGLang answered with."""
    try:
        said = parsed(answer)
    except AnswerError:
        return shortened(answer.decode(errors="replace"))
    if isinstance(said, dict):
        error = said.get("error")
        said = said.get("error_message") or (error.get("message") if isinstance(error, dict) else error) or said
    return shortened(str(said))
