"""The sampler of `megarl serve`: answers of SGLang's servers (0.5.23), with many adapters by name beside one base model, or
one of several sets of all weights at a time.

A request goes to the server with the fewest samples under way, and to another one if that server is lost. Tenants take turns.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from megarl.errors import EngineError
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.shape import ModelShape
from megarl.observe.record_lines import object_line
from megarl.options.serve.answered_arrays import AbortedError, read_sampled
from megarl.options.serve.asked_bodies import Bodies, EngineLimits, bodies, check_request, draws_of, shown_tokens
from megarl.options.serve.engine_arguments import loaded_adapters
from megarl.options.serve.engine_server import AskedEngine, EngineServer, NamedAdapter, ServerLostError, WholeServer
from megarl.options.serve.section import serve_of
from megarl.options.serve.served_pictures import ServedPictures
from megarl.options.serve.tenant_turns import TenantTurns
from megarl.options.serve.values import RequestError, Sampled, SampleRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from megarl.core.session import Session
    from megarl.workers.rollouts import Rollouts

TRIES = 4
"""How many servers a request is sent to, if each of them is lost."""
KEPT_S = 3.0
"""How long an unused connection is kept: less than SGLang's five seconds, after which it closes them itself."""
MOST_CONNECTIONS = 2048
SAMPLES = 256
"""Samples that a server works on at once, where it does not say."""
DRAWS_OF_A_SAMPLE = 16
"""Draws at a prompt's positions, a token each, that count as one sample where turns are taken."""
AHEAD = 1.25
"""Samples in a server's own queue, so that it need not wait for the next turn."""
GRACE_S = 30.0
MODEL_CONFIG = "config.json"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NOT_READ = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Fields of a PEFT folder's config that SGLang passes over, though they change the result."""


class SglangSampler:
    """A `Sampler` (values.py) on the servers of `engines`. Its methods are awaited in one event loop."""

    def __init__(
        self,
        engines: Sequence[AskedEngine],
        limits: EngineLimits,
        *,
        most_adapters: int,
        max_rank: int,
        most_samples: int = SAMPLES,
        restart_s: float = 600.0,
        pictures: ServedPictures | None = None,
        base: Path | None = None,
    ) -> None:
        """`most_adapters`: those that a server holds at once, of `max_rank` at most. `most_samples`: at once on all servers,
        before tenants wait for turns. `restart_s`: for a lost server to start. `pictures`: takes those of prompts; None:
        servers are given them as they were sent. `base`: the folder that servers start with, where what is added are model
        folders and no adapters."""
        self.limits, self.max_rank, self.pictures = limits, max_rank, pictures
        self.turns = TenantTurns(most_samples)
        self._http: aiohttp.ClientSession | None = None
        self._is_whole, first = base is not None, NamedAdapter("base", base or Path())
        self._resizing: ThreadPoolExecutor | None = None
        self.servers = [
            WholeServer(engine, number, self._session, first, restart_s)
            if self._is_whole
            else EngineServer(engine, number, self._session, most_adapters, restart_s)
            for number, engine in enumerate(engines)
        ]
        self._adapters: dict[str, NamedAdapter] = {}
        self._start, self._numbers = secrets.token_hex(4), count()

    # adapters -----------------------------------------------------------------------------------------------------

    async def add(self, adapter: str, folder: Path) -> None:
        """Have every server that is up load the PEFT folder, which must stay where it is until `drop`.

        Servers read it again when they had to drop it for others, or were started again, and a lost one when it is first asked
        with it. A name that is there already gets the new folder, and requests that are under way go on with the old one.

        Raises:
            RequestError: it is no folder that SGLang adds exactly.
            EngineError: a server failed to load it.
        """
        await asyncio.to_thread(self._check_folder, folder)
        new = NamedAdapter(self._name(), folder.resolve())
        for _ in range(TRIES):
            with suppress(ServerLostError):
                await self._up()
            loading = [self._load(server, new) for server in self.servers if server.is_up]
            failed = [error for error in await asyncio.gather(*loading, return_exceptions=True) if error is not None]
            others = [error for error in failed if not isinstance(error, ServerLostError)]
            if others:
                await self._forget(new)
                raise others[0]
            if len(failed) < len(loading):
                break
        old, self._adapters[adapter] = self._adapters.get(adapter), new
        if old is not None:
            await self._forget(old)

    async def _load(self, server: EngineServer, adapter: NamedAdapter) -> None:
        async with server.holding(adapter):
            pass

    async def drop(self, adapter: str) -> None:
        """Have servers forget it, once the requests that use it have ended; new ones do not find it any more."""
        dropped = self._adapters.pop(adapter, None)
        if dropped is not None:
            await self._forget(dropped)

    async def _forget(self, adapter: NamedAdapter) -> None:
        while adapter.users:
            adapter.unused.clear()
            await adapter.unused.wait()
        await asyncio.gather(*(server.forget(adapter) for server in self.servers))

    def _check_folder(self, folder: Path) -> None:
        if self._is_whole:
            if not (folder / MODEL_CONFIG).is_file() or not [*folder.glob("*.safetensors")]:
                raise RequestError(f"the weights have no {MODEL_CONFIG}, or no safetensors; they must be a model folder")
            return
        for name in (_CONFIG, _WEIGHTS):
            if not (folder / name).is_file():
                raise RequestError(f"the adapters have no {name}; they must be a PEFT folder with safetensors")
        try:
            config = object_line((folder / _CONFIG).read_bytes())
            rank = int(config["r"])
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{_CONFIG} of the adapters is none of LoRA: {error}") from error
        if not 1 <= rank <= self.max_rank:
            raise RequestError(f"the adapters have the rank {rank}; it must be from 1 to {self.max_rank} (serve.max_rank)")
        for name in _NOT_READ:
            if config.get(name):
                raise RequestError(f"{name} of the adapters is set, which the engines do not add exactly; it must be left out")

    # samples ------------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sampled:
        """Answer a request; cancelling the task ends its requests in the servers.

        A seed gives the same answers again, on whichever server, as far as the model's arithmetic does. Log-probs are as
        `asked_bodies.py` says.

        Raises:
            RequestError: the request is none that engines answer.
            EngineError: servers failed.
        """
        check_request(request, self.limits)
        work = request.num_samples + -(-draws_of(request) // DRAWS_OF_A_SAMPLE)
        async with self._using(request.adapter) as adapter, self.turns.turn(request.tenant, work):
            request = await self._with_final_pictures(request)
            for _ in range(TRIES):
                server = _least_loaded(await self._up(), adapter)
                server.load += work
                try:
                    return await self._on(server, request, adapter)
                except (ServerLostError, AbortedError) as error:
                    last = error
                finally:
                    server.load -= work
            raise EngineError(f"a request was lost {TRIES} times, at last: {last}")

    async def _with_final_pictures(self, request: SampleRequest) -> SampleRequest:
        """The request with its pictures as the model takes them, made in a thread of their own: others go on meanwhile."""
        if not request.pictures or self.pictures is None:
            return request
        self._resizing = self._resizing or ThreadPoolExecutor(1, "pictures of prompts")
        final = asyncio.get_running_loop().run_in_executor(self._resizing, self.pictures.final, request.pictures)
        return replace(request, pictures=await final)

    @asynccontextmanager
    async def _using(self, name: str | None) -> AsyncIterator[NamedAdapter | None]:
        """The adapter of this name, which is not dropped meanwhile; None: the base."""
        if name is None:
            yield None
            return
        adapter = self._adapters.get(name)
        if adapter is None:
            raise RequestError(f"the sampler '{name}' is not there, or no more", status=404)
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1
            if not adapter.users:
                adapter.unused.set()

    async def _up(self) -> list[EngineServer]:
        """The servers that are up, once there is one; others are being found.

        Raises:
            ServerLostError: none could be found.
        """
        finding = [server.find() for server in self.servers if not server.is_up]
        while finding and not any(server.is_up for server in self.servers):
            done, pending = await asyncio.wait(finding, return_when=asyncio.FIRST_COMPLETED)
            finding = [*pending]
            if not pending and not any(server.is_up for server in self.servers):
                done.pop().result()
        return [server for server in self.servers if server.is_up]

    async def _on(self, server: EngineServer, request: SampleRequest, adapter: NamedAdapter | None) -> Sampled:
        async with server.holding(adapter) as name:
            asked = bodies(request, self.limits, self._name, name)
            try:
                prompt = await server.generate(asked.prompt) if asked.prompt is not None else None
                samples, draws = await _all_of(server, asked)
            except BaseException:
                await asyncio.shield(server.abort(asked.names))
                raise
            if request.pictures:
                self._check_shown(request, samples[0])
            return read_sampled(request, asked, prompt, samples, draws)

    def _check_shown(self, request: SampleRequest, answer: Mapping[str, Any]) -> None:
        """Refuse pictures that are other tokens for the server than for the client."""
        computed, told = answer.get("prompt_token_ids"), shown_tokens(request, self.limits).tolist()
        if computed != told:
            seen = len(computed) if isinstance(computed, list) else 0
            raise RequestError(f"pictures of the prompt make it {seen} tokens for the model; it has {len(told)}")

    # the servers --------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        """A name that neither a request nor an adapter had before; none is the beginning of another one."""
        return f"serve-{self._start}-{next(self._numbers):010x}"

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=MOST_CONNECTIONS, keepalive_timeout=KEPT_S)
            self._http = aiohttp.ClientSession(connector=connector)
        return self._http

    async def close(self) -> None:
        """End the connections; the servers go on."""
        for server in self.servers:
            await server.stop()
        if self._resizing is not None:
            self._resizing.shutdown(wait=False, cancel_futures=True)
        if self._http is not None:
            await self._http.close()
            self._http = None


def _least_loaded(servers: Sequence[EngineServer], adapter: NamedAdapter | None) -> EngineServer:
    """The server with the fewest samples under way, of several one that has the adapter."""
    return min(servers, key=lambda server: (server.load, not server.has(adapter)))


async def _all_of(server: EngineServer, asked: Bodies) -> tuple[list[Any], list[Any]]:
    """The answers to all samples and draws; the first failure ends the others."""
    tasks = [asyncio.create_task(server.generate(body)) for body in asked.samples]
    drawing = [asyncio.create_task(server.generate(asked.draws))] if asked.draws is not None else []
    tasks += drawing
    try:
        answers = await asyncio.gather(*tasks)
        return answers[: len(asked.samples)], answers[-1] if drawing else []
    finally:
        for task in tasks:
            task.cancel()


def open_sampler(session: Session, pictures: ServedPictures | None = None) -> SglangSampler:
    """The sampler on the engines of a session that was started, for the section `serve` of its config."""
    config, rollouts = session.config, cast("Rollouts", session.rollouts)
    serve = serve_of(config)
    assert serve is not None, "a server's config has the section serve"
    states, hf_config = rollouts.scheduler.engines, load_hf_config(config.model.path)
    vision = architecture_for(hf_config).vision(hf_config)
    end = session.inputs.tokenizer.eos_token_id
    limits = EngineLimits(
        serve.context_tokens,
        ModelShape.read(config.model.path).vocab,
        str(Path(config.model.path).resolve()),
        (end,) if end is not None else (),
        vision.image_token if vision is not None else None,
    )
    return SglangSampler(
        [cast("AskedEngine", state.handle) for state in states],
        limits,
        most_adapters=loaded_adapters(serve.live_models),
        max_rank=serve.max_rank,
        most_samples=int(AHEAD * sum(state.capacity.responses or SAMPLES for state in states)),
        restart_s=config.resources.deadlines.start_s + GRACE_S,
        pictures=pictures,
        base=Path(config.model.path).resolve() if serve.full_weights else None,
    )
