"""An engine of this site for a run elsewhere: it joins by a URL and a token, fetches weights and work, answers, and leaves.

Every connection goes out from here. Where the run cannot be reached the engine keeps its weights and joins again as soon as it
can be: what the run took back meanwhile it has given to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import msgspec

from megarl.config.engine_kinds import KINDS
from megarl.data.stop_finder import ModelTexts
from megarl.errors import ConfigError, DeadlineError, EngineError, MegarlError
from megarl.options.elastic_engines.sites.model_facts import check_fits, model_facts
from megarl.options.elastic_engines.sites.weight_store import (
    FULL,
    INDEX,
    HeldWeights,
    VersionIndex,
    check_index,
    told_bytes,
    zstandard,
)
from megarl.options.elastic_engines.sites.wire import (
    BUSY,
    LONGEST_POLL_S,
    MOST_ERROR,
    SENT_OPTIONS,
    Joined,
    Joining,
    Leaving,
    ModelFacts,
    Order,
    Orders,
    Poll,
    SiteAnswer,
    SiteFacts,
    read_request,
    sent_response,
)
from megarl.rollout.engines.protocol import Engine
from megarl.rollout.engines.registry import CLASSES, load_engine
from megarl.rollout.engines.stops import ended_at_stops
from megarl.version import __version__

ANSWER_S = 60.0
RETRY_S = 0.5
MOST_ANSWER_BYTES = 256 << 20
"""Of what the run says, weights apart."""
CHUNK_BYTES = 1 << 20
BUCKET_BYTES = 256 << 20
"""Weights that the engine is given at a time."""
FETCH_TRIES = 20


FolderOf = Callable[[str], str]


class NotThereError(MegarlError):
    """The run does not know the engine, or does not hold a version, (any more)."""


class RunAnswers:
    """The run's HTTP server, as a site asks it."""

    def __init__(self, url: str, token: str, patience_s: float) -> None:
        """`patience_s`: for which a run that does not answer is tried again.

        Raises:
            ConfigError: the URL is none.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"URL is '{url}'; it must be http://HOST:PORT or https://HOST:PORT")
        self._url, self._patience_s = url.rstrip("/"), patience_s
        headers = {"Authorization": f"Bearer {token}"}
        timeout = aiohttp.ClientTimeout(total=None, connect=ANSWER_S, sock_read=LONGEST_POLL_S + ANSWER_S)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, auto_decompress=False)

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def ask(self, path: str, kind: Any, body: msgspec.Struct | None = None, *, once: bool = False) -> Any:
        """The run's answer, read as `kind`. Tried again while it is busy or cannot be reached, unless it is asked `once`.

        Raises:
            ConfigError: the token is wrong, or the run refuses; or it could not be reached.
            NotThereError: see there.
        """
        content = None if body is None else msgspec.json.encode(body)
        ends_at = time.monotonic() + (0.0 if once else self._patience_s)
        while True:
            try:
                status, answer = await self._talk(path, content)
                if status != BUSY or time.monotonic() > ends_at:
                    break
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if time.monotonic() > ends_at:
                    raise ConfigError(f"no run answers at {self._url}: {_said(error)}") from None
            await asyncio.sleep(RETRY_S)
        if status != 200:
            self._refuse(status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._url} answers {path} with what no run of megarl says: {error}") from None

    async def _talk(self, path: str, content: bytes | None) -> tuple[int, bytes]:
        method, headers = ("GET", {}) if content is None else ("POST", {"Content-Type": "application/json"})
        url = self._url + path
        async with self._session.request(method, url, data=content, headers=headers, allow_redirects=False) as answer:
            body = bytearray()
            async for piece in answer.content.iter_chunked(CHUNK_BYTES):
                body += piece
                if len(body) > MOST_ANSWER_BYTES:
                    raise ConfigError(f"{self._url} answers {path} with more than {MOST_ANSWER_BYTES} bytes")
            return answer.status, bytes(body)

    def _refuse(self, status: int, answer: bytes) -> NoReturn:
        if status in (404, 410):
            raise NotThereError(f"{self._url} knows nothing of it")
        try:
            why = str(msgspec.json.decode(answer, type=dict[str, str])["error"])[:MOST_ERROR]
        except (msgspec.DecodeError, KeyError):
            why = f"it answers with status {status}"
        raise ConfigError(f"{self._url} refuses: {why if why.isprintable() else ascii(why)}")

    async def index(self, version: int) -> VersionIndex:
        """The index of a version of the weights; raises as `ask` does."""
        return check_index(await self.ask(f"/weights/{version}/{INDEX}", VersionIndex))

    async def fetch(self, version: int, part: str, nbytes: int, path: Path) -> None:
        """Write a version's file to `path`, `nbytes` bytes; what was interrupted goes on where it ended.

        Raises:
            NotThereError: the run does not hold it any more.
            EngineError: it has another size, or was interrupted too often.
        """
        path.write_bytes(b"")
        for _ in range(FETCH_TRIES):
            have = path.stat().st_size
            if have >= nbytes:
                break
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._fetch_from(have, f"/weights/{version}/{part}", nbytes, path)
            if path.stat().st_size < nbytes:
                await asyncio.sleep(RETRY_S)
        if path.stat().st_size != nbytes:
            raise EngineError(f"weights of version {version} came with {path.stat().st_size} bytes of {nbytes}")

    async def _fetch_from(self, start: int, where: str, nbytes: int, path: Path) -> None:
        headers = {"Range": f"bytes={start}-"} if start else {}
        async with self._session.get(self._url + where, headers=headers, allow_redirects=False) as answer:
            if answer.status not in (200, 206):
                self._refuse(answer.status, await answer.content.read(MOST_ERROR))
            with path.open("ab" if answer.status == 206 else "wb") as file:
                async for piece in answer.content.iter_chunked(CHUNK_BYTES):
                    file.write(piece)
                    if file.tell() > nbytes:
                        return


def _sent(error: BaseException) -> str:
    """Give the part of its sentence that the run takes."""
    return str(error)[:MOST_ERROR]


def _said(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason}"
    return (str(error) or type(error).__name__).partition("\n")[0]


@dataclass
class SiteSettings:
    """Words that `megarl node join` was given. `name`: of the site; `say` prints a line."""

    url: str
    token: str
    name: str
    patience_s: float
    say: Callable[[str], None]


async def checked_facts(run: RunAnswers, model: FolderOf) -> tuple[SiteFacts, ModelFacts, type[Engine]]:
    """Ask the run what it needs, and compare; nothing is loaded yet.

    Raises:
        ConfigError, ModelError: an engine of this machine cannot join, one sentence.
    """
    zstandard()
    facts: SiteFacts = await run.ask("/site", SiteFacts, once=True)
    if facts.engine not in KINDS or not {*facts.options} <= {*SENT_OPTIONS}:
        raise ConfigError(f"the run's rollout.engine is {facts.engine!r:.100}, of which other sites can have none")
    here = await asyncio.to_thread(model_facts, model(facts.path))
    check_fits(here, facts)
    return facts, here, load_engine(CLASSES[facts.engine])


class SiteEngine:
    """An engine here that works for the run."""

    def __init__(self, run: RunAnswers, engine: Engine, model: str, facts: ModelFacts, settings: SiteSettings) -> None:
        self._run, self._engine, self._facts, self._settings = run, engine, facts, settings
        self._texts, self._held = ModelTexts(model), HeldWeights(None, {})
        self._joined: Joined | None = None
        self._seen = self._polls = 0
        self._newest: int | None = None
        self._is_new, self._is_open, self._has_news = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._at_work: set[asyncio.Task[None]] = set()
        self._generating: dict[int, asyncio.Task[None]] = {}
        """By the order's number; another one whenever it has joined, as numbers begin anew."""
        self._others: set[asyncio.Task[Any]] = set()
        self._bytes = {"full": 0, "difference": 0}
        self._answered = 0
        self._end = asyncio.get_running_loop().create_future()

    async def work(self) -> str:
        """Join, and work until the run ends it; returns why it did.

        Raises:
            MegarlError: the run refuses it, or is gone; or its engine failed.
        """
        await self._join()
        tasks = [asyncio.create_task(self._follow_orders()), asyncio.create_task(self._follow_weights())]
        try:
            done, _ = await asyncio.wait([*tasks, self._end], return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                if (why := one.result()) is not None:
                    return str(why)
            return "it has ended"
        except EngineError as error:
            with contextlib.suppress(MegarlError):
                assert self._joined is not None, "it has joined"
                await self._run.ask("/leave", dict[str, Any], Leaving(self._joined.key, _sent(error)), once=True)
            raise
        finally:
            for task in [*tasks, *self._at_work, *self._others]:
                task.cancel()
            await asyncio.gather(*tasks, *self._at_work, *self._others, return_exceptions=True)

    def leave(self) -> None:
        """Have the run take back what is under way here, which ends `work`; asked again, end it at once."""
        if self._joined is None or self._others:
            if not self._end.done():
                self._end.set_result("it was ended at once")
            return
        self._settings.say("leaving: what it works on goes on elsewhere")
        self._others.add(asyncio.create_task(self._ask_to_leave()))

    async def _ask_to_leave(self) -> None:
        assert self._joined is not None, "it has joined"
        try:
            await self._run.ask("/leave", dict[str, Any], Leaving(self._joined.key))
        except MegarlError as error:
            if not self._end.done():
                self._end.set_result(f"the run could not be told: {error}")

    async def _join(self) -> None:
        joining = Joining(__version__, self._facts, self._settings.name)
        joined: Joined = await self._run.ask("/join", Joined, joining)
        for task in self._at_work:
            task.cancel()
        self._generating = {}
        if self._joined is not None and self._joined.life != joined.life:  # a version's number says nothing there
            self._held.version = None
        self._joined, self._seen, self._newest = joined, 0, None
        self._settings.say(f"joined as engine {joined.number}")

    # work -----------------------------------------------------------------------------------------------------------

    async def _follow_orders(self) -> str | None:
        while True:
            try:
                orders = await self._poll(self._told(self._held.version if self._is_open.is_set() else None))
            except NotThereError:
                self._settings.say("the run has given it up, as it was not heard of; it joins again")
                await self._join()
                continue
            if orders is None:
                continue
            if orders.newest != self._newest:
                self._newest = orders.newest
                self._is_new.set()
            for order in orders.orders:
                if order.number > self._seen:
                    self._seen = order.number
                    if order.what == "end":
                        with contextlib.suppress(MegarlError):  # so that the run knows that it was told
                            await self._run.ask("/orders", Orders, self._told(None), once=True)
                        return " ".join(order.words) or "the run ended it"
                    self._follow(order)

    def _told(self, version: int | None) -> Poll:
        assert self._joined is not None, "it has joined"
        self._polls += 1
        full, difference = self._bytes["full"], self._bytes["difference"]
        return Poll(self._joined.key, self._polls, self._seen, version, self._newest, full, difference)

    async def _poll(self, poll: Poll) -> Orders | None:
        """The run's orders; None: there is something to tell it, for which it is asked anew."""
        self._has_news.clear()
        asking = asyncio.create_task(self._run.ask("/orders", Orders, poll))
        news = asyncio.create_task(self._has_news.wait())
        try:
            await asyncio.wait([asking, news], return_when=asyncio.FIRST_COMPLETED)
            return await asking if asking.done() else None
        finally:
            for task in (asking, news):
                task.cancel()
            await asyncio.gather(asking, news, return_exceptions=True)

    def _follow(self, order: Order) -> None:
        key = self._joined.key if self._joined is not None else ""
        if order.what == "generate":
            generating = self._generating
            generating[order.number] = task = self._begin(self._generate(order, key))
            task.add_done_callback(lambda _: generating.pop(order.number))
        elif order.what == "stop" and order.stop in self._generating:
            self._generating[order.stop].cancel()
        elif order.what == "cut":
            self._do(self._engine.cut(order.words))
        elif order.what == "end_conversations":
            self._do(self._engine.end_conversations(order.words))

    def _do(self, work: Awaitable[None]) -> None:
        async def do() -> None:
            with contextlib.suppress(EngineError):
                await work

        self._begin(do())

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)
        return task

    async def _generate(self, order: Order, key: str) -> None:
        assert order.request is not None, "it is to generate"
        try:
            request = read_request(order.request)
            await self._is_open.wait()
            generations = await self._engine.generate(request)
            if request.params.looked_for:
                generations = await asyncio.to_thread(ended_at_stops, request.prompts, generations, request.params, self._texts)
            responses = [[sent_response(one) for one in of_prompt] for of_prompt in generations]
            answer = SiteAnswer(key, order.number, responses)
        except (EngineError, DeadlineError) as error:
            answer = SiteAnswer(key, order.number, error=_sent(error))
        failed: MegarlError | None = EngineError(f"the engine here failed: {answer.error}") if answer.error else None
        try:
            await self._run.ask("/answer", dict[str, Any], answer)
            self._answered += 1
        except NotThereError:
            pass  # the run has given the work to others
        except ConfigError as error:
            failed = failed or error
        if failed is not None and not self._end.done():
            self._end.set_exception(failed)

    # weights --------------------------------------------------------------------------------------------------------

    async def _follow_weights(self) -> str | None:
        with tempfile.TemporaryDirectory(prefix="megarl-weights-") as folder:
            while True:
                await self._is_new.wait()
                self._is_new.clear()
                if self._newest is not None and self._newest != self._held.version:
                    try:
                        await self._take(self._newest, Path(folder) / "part")
                    except NotThereError:
                        await asyncio.sleep(RETRY_S)  # there is a newer one, of which the next orders tell

    async def _take(self, version: int, path: Path) -> None:
        """Fetch a version, and give it to the engine: by differences, if it has what these are from, else whole.

        Raises:
            NotThereError: the run has a newer one.
            EngineError: also whole it is not what the run has.
        """
        since, index = time.monotonic(), await self._run.index(version)
        for part in dict.fromkeys([self._held.part_for(index), FULL]):
            nbytes = index.full_bytes if part == FULL else index.difference_bytes
            await self._run.fetch(version, part, nbytes, path)
            self._bytes[part] += nbytes
            try:
                await self._give(index, part, path)
                break
            except EngineError as error:
                if part == FULL:
                    raise
                self._settings.say(f"{error}: all of version {version} is fetched")
        share = f"{100 * nbytes / max(1, index.nbytes):.3g} % of {told_bytes(index.nbytes)}"
        what = "whole" if part == FULL else f"as differences from version {index.base}"
        seconds = time.monotonic() - since
        self._settings.say(
            f"weights of version {version} {what}: {told_bytes(nbytes)}, {share}, {seconds:.1f} s; checksums equal"
        )

    async def _give(self, index: VersionIndex, part: str, path: Path) -> None:
        """Responses under way stay in the engine, and go on under the new weights."""
        self._is_open.clear()
        await self._engine.begin_update(index.version)
        try:
            taking, bucket, size = self._held.take(index, part, path), [], 0
            while (named := await asyncio.to_thread(next, taking, None)) is not None:
                bucket.append(named)
                size += named[1].nbytes
                if size >= BUCKET_BYTES:
                    await self._engine.apply_update(bucket)
                    bucket, size = [], 0
            await self._engine.apply_update(bucket)
            await self._engine.end_update(index.version)
        except EngineError:
            self._held.version = None
            with contextlib.suppress(EngineError):  # it has failed already
                await self._engine.abandon_update()
            raise
        self._is_open.set()
        self._has_news.set()

    @property
    def figures(self) -> str:
        """A summary of its work, for the last line."""
        fetched = (
            f"{told_bytes(self._bytes['difference'])} of differences and {told_bytes(self._bytes['full'])} of full weights"
        )
        return f"{self._answered} requests answered, {fetched} fetched"


async def join(settings: SiteSettings, on_signal: Callable[[Callable[[], None]], None], model: FolderOf) -> None:
    """Start an engine of the run at `settings.url` here, and work for it until it is over, or `on_signal`'s callback is called.

    `model` gives the model's folder here, from that of the run.

    Raises:
        MegarlError: one sentence: an engine of this machine cannot join, or it failed, or the run is gone.
    """
    run = RunAnswers(settings.url, settings.token, settings.patience_s)
    engine: Engine | None = None
    try:
        facts, here, kind = await checked_facts(run, model)
        folder = model(facts.path)
        settings.say(f"the run at {settings.url} has this model; the engine starts")
        engine = await kind.start(folder, initial_version=None, **facts.options)
        working = SiteEngine(run, engine, folder, here, settings)
        on_signal(working.leave)
        why = await working.work()
        settings.say(f"left: {why}; {working.figures}")
    finally:
        if engine is not None:
            await engine.stop()
        await run.close()
