"""`mcp:NAME`: the tools of an MCP server, a program on this machine (stdio) or one at a URL (streamable HTTP).

The protocol is spoken by the official `mcp` package, in an event loop and a thread of its own. A server that ends, hangs or
cannot be reached is one answer to whoever called it, and is started again for the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from base64 import b64decode
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

from PIL import Image

from megarl.data.told import MediaKeeper
from megarl.errors import EpisodeError
from megarl.options.tools.answers import ToolAnswer, late, told_answer
from megarl.options.tools.section import McpServerConfig
from megarl.options.tools.toolbox import CallTool
from megarl.system.user_code import describe

PREFIX = "mcp:"
START_S = 60.0
"""For a server to start and say which tools it has."""
SIGN_OF_LIFE_S = 2.0
"""For a server that did not answer a call in time to answer whether it is there."""
END_S = 10.0

# An ended run must not leave the server: this program ends with the thread that started it, then becomes the server.
_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"

T = TypeVar("T")


class _LostError(Exception):
    """The server cannot be reached."""


class McpTools:
    """A `ToolSource`: the tools of one server, which all episodes share, or which is started anew for each."""

    def __init__(self, name: str, settings: McpServerConfig, timeout_s: float, pictures: MediaKeeper | None) -> None:
        """Start the server that the config calls `name`. A call has `timeout_s` seconds.

        Raises:
            EpisodeError: the package is missing, the server does not start, or it has not the tools that the config names.
        """
        self.name, self._settings, self._timeout_s, self._pictures = name, settings, timeout_s, pictures
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mcp-{name}", daemon=True)
        self._thread.start()
        self._open: set[_Server] = set()
        try:
            self._shared = _Connection(settings, self._open)
            listed = asyncio.run_coroutine_threadsafe(self._shared.tools(), self._loop).result(START_S + END_S)
            self.schemas = self._chosen(listed)
            if settings.per_episode:
                asyncio.run_coroutine_threadsafe(self._shared.close(), self._loop).result(END_S)
        except _LostError as error:
            self.close()
            raise EpisodeError(f"the MCP server '{name}' (rollout.episode.mcp) does not start: {error}") from None
        except BaseException:
            self.close()
            raise

    def _chosen(self, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """The schemas of the tools that the config names, or of all."""
        names, known = self._settings.tools, [tool.name for tool in tools]
        for name in names:
            if name not in known:
                raise EpisodeError(
                    f"rollout.episode.mcp.{self.name}.tools has '{name}', which the server does not have; "
                    f"it has {', '.join(known)}"
                )
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for tool in tools
            if not names or tool.name in names
        ]

    @contextlib.asynccontextmanager
    async def begun(self, row: Mapping[str, Any]) -> AsyncIterator[CallTool]:
        """The tools of one episode."""
        connection = _Connection(self._settings, self._open) if self._settings.per_episode else self._shared

        async def call(name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
            return await self._in_loop(self._call(connection, name, arguments))

        try:
            yield call
        finally:
            if connection is not self._shared:
                await asyncio.shield(self._in_loop(connection.close()))

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _call(self, connection: _Connection, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        lost = ToolAnswer.whole(f"error: the MCP server of {name} ended; it is started again for the next call", "tool_errors")
        server = connection.server()
        try:
            client = await server.client()
        except _LostError as error:
            return ToolAnswer.whole(f"error: the MCP server of {name} cannot be reached: {error}", "tool_errors")
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await server.until_lost(client.call_tool(name, dict(arguments)))
        except TimeoutError:
            await server.close_unless_alive()
            return late(name, self._timeout_s)
        except _LostError:
            return lost
        except Exception as error:  # noqa: BLE001 - what the package raises for an error of the protocol, or a broken pipe
            if await server.close_unless_alive():
                return ToolAnswer.whole(f"error: {name}: {error}", "tool_errors")
            return lost
        return await asyncio.to_thread(self._told, name, result)

    def _told(self, name: str, result: Any) -> ToolAnswer:
        texts = [block.text for block in result.content if block.type == "text"]
        if result.is_error:
            return ToolAnswer.whole("error: " + "\n".join(texts), "tool_errors")
        if not result.content and result.structured_content is not None:
            return told_answer(result.structured_content, self._pictures)
        left_out = sorted({block.type for block in result.content} - {"text", "image"})
        text = "\n".join([*texts, *(f"[{kind}: not shown]" for kind in left_out)])
        images = [block.data for block in result.content if block.type == "image"]
        if not images:
            return told_answer(text, self._pictures)
        try:
            shown = [Image.open(BytesIO(b64decode(data)), formats=("PNG", "JPEG", "WEBP", "GIF")) for data in images]
        except (ValueError, OSError) as error:
            return ToolAnswer.whole(f"error: {name} answered with a picture that cannot be read: {error}", "tool_errors")
        if self._pictures is None:
            return ToolAnswer.whole(f"{text}\n[{len(shown)} pictures: the model takes none]", "tool_errors")
        return told_answer({"text": text, "images": shown}, self._pictures)

    def close(self) -> None:
        """End the servers and the thread."""
        if not self._loop.is_running():
            return

        async def close_all() -> None:
            await asyncio.gather(*(server.close() for server in list(self._open)), return_exceptions=True)

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(close_all(), self._loop).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=END_S)
        if not self._loop.is_running():
            self._loop.close()


class _Connection:
    """A server that is started when it is needed; it runs, with all of its starts, in one event loop."""

    def __init__(self, settings: McpServerConfig, open_ones: set[_Server]) -> None:
        """`open_ones` has the servers while they run."""
        self._settings, self._open_ones = settings, open_ones
        self._server: _Server | None = None

    def server(self) -> _Server:
        """The server that runs or starts, else a new one."""
        if self._server is None or self._server.is_over:
            self._server = _Server(self._settings, self._open_ones)
        return self._server

    async def tools(self) -> list[Any]:
        """The tools that the server has.

        Raises:
            _LostError: it does not say.
        """
        client, tools, cursor = await self.server().client(), [], None
        while True:
            try:
                async with asyncio.timeout(START_S):
                    page = await client.list_tools(cursor=cursor)
            except Exception as error:  # noqa: BLE001 - whatever it is, there is no answer
                raise _LostError(f"it does not list its tools: {_reason(error)}") from None
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()


class _Server:
    """A server from its start to its end. Calls that were made to it, and may close it, have it in hand."""

    def __init__(self, settings: McpServerConfig, open_ones: set[_Server]) -> None:
        """Begin to start it. `open_ones` has it until it has ended."""
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda client: client.exception())  # whoever waited may have gone away
        self._stop = asyncio.Event()
        # the package's contexts must be left by the task that entered them
        self._keeping = asyncio.create_task(self._keep(settings, open_ones))
        open_ones.add(self)

    @property
    def is_over(self) -> bool:
        return self._stop.is_set() or self._keeping.done()

    async def _keep(self, settings: McpServerConfig, open_ones: set[_Server]) -> None:
        try:
            async with _entered(settings) as client:
                if not self._client.done():
                    self._client.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            self._fail(_reason(error))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            open_ones.discard(self)

    def _fail(self, why: str) -> None:
        """Tell those who wait for its start that it does not."""
        if not self._client.done():
            self._client.set_exception(_LostError(why))

    async def client(self) -> Any:
        """The client, once the server has started.

        Raises:
            _LostError: it does not start.
        """
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._client)
        except TimeoutError:
            self._fail(f"it did not answer within {START_S:g} s")
            await self.close()
            return self._client.result()

    async def until_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, unless the connection ends first.

        Raises:
            _LostError: it did.
        """
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([working, self._keeping], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _LostError
            return working.result()
        finally:
            working.cancel()

    async def close_unless_alive(self) -> bool:
        """Return whether it answers; one that does not is closed."""
        try:
            async with asyncio.timeout(SIGN_OF_LIFE_S):
                await self._client.result().session.list_tools()
        except Exception:  # noqa: BLE001 - whatever it is, there is no answer
            await self.close()
            return False
        return True

    async def close(self) -> None:
        self._stop.set()
        self._fail("it was ended before it answered")
        _, late_ones = await asyncio.wait([self._keeping], timeout=END_S / 2)
        for task in late_ones:
            task.cancel()


@contextlib.asynccontextmanager
async def _entered(settings: McpServerConfig) -> AsyncIterator[Any]:
    """A client that is connected.

    Raises:
        EpisodeError: the package is missing.
    """
    try:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError:
        raise EpisodeError("the package 'mcp' is not installed; try `pip install 'megarl[mcp]'`") from None
    async with contextlib.AsyncExitStack() as stack:
        if settings.url is not None:
            headers = {}
            if settings.token_env is not None:
                headers["Authorization"] = f"Bearer {os.environ.get(settings.token_env, '')}"
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30, read=300)))
            transport = streamable_http_client(settings.url, http_client=http)
        else:
            passed = {name: os.environ[name] for name in settings.pass_environment if name in os.environ}
            server = StdioServerParameters(
                command=sys.executable,
                args=["-I", "-c", _WITH_PARENT, *settings.command],
                env={**passed, **settings.environment},
            )
            errors = open(os.devnull, "w")  # noqa: SIM115 - closed with the connection
            stack.callback(errors.close)
            transport = stdio_client(server, errlog=errors)
        yield await stack.enter_async_context(Client(transport))


def _reason(error: BaseException) -> str:
    """The first error inside groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, EpisodeError) else describe(error)
