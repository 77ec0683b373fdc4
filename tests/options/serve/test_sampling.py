"""Sampling sessions to which something happens while requests wait or engines load: a deletion, an end, a repeated request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from megarl.options.serve.futures import Promises
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import SamplerRecord, SessionRecord
from megarl.options.serve.sampling import ServedSamplers
from megarl.options.serve.settings import ServiceOptions
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import LOCAL, Tenants
from megarl.options.serve.values import Answer, RequestError, Sampled, SampleRequest
from megarl.options.serve.worker import ClientModel

PATH = CheckpointPath("s:train:0", "sampler_weights", "mine")
SAMPLER = "s:sample:0"
MODEL = ClientModel("s:train:0", LOCAL.name, "s", "base", None)


class Engines:
    """A `Sampler` that answers once `sampling` is set, and loads once `loading` is."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.loads: list[str] = []
        self.there: set[str] = set()
        self.sampling, self.loading = asyncio.Event(), asyncio.Event()
        self.loading.set()

    async def add(self, adapter: str, folder: Path) -> None:
        self.loads.append(adapter)
        await self.loading.wait()
        self.there.add(adapter)

    async def drop(self, adapter: str) -> None:
        self.there.discard(adapter)

    async def sample(self, request: SampleRequest) -> Sampled:
        self.asked.append(request.adapter)
        await self.sampling.wait()
        return Sampled([Answer(np.array([1], np.int32), np.array([0.0], np.float32), "stop")])


class Server:
    """Sampling sessions of one session `s` with a checkpoint, and one place at the engines."""

    def __init__(self, root: Path) -> None:
        self.store, self.engines, self.promises = CheckpointStore(root), Engines(), Promises()
        self.store.registry.sessions.add(SessionRecord("s", LOCAL.name, 1.0))
        with self.store.writing(LOCAL, PATH, {"base_model": "base", "rank": 4}) as folder:
            (folder / "adapter_config.json").write_text("{}")
        options = ServiceOptions({"base": 64}, root / "scratch", sampling_slots=1)
        self.samplers = ServedSamplers(options, self.engines, self.promises, self.store, Tenants())

    async def create(self, model_path: str | None = PATH.text, base_model: str | None = None, number: int = 0) -> Any:
        asked = types.CreateSamplingSessionRequest(
            session_id="s", sampling_session_seq_id=number, model_path=model_path, base_model=base_model
        )
        return await self.samplers.create(LOCAL, asked)

    async def pass_on(self, number: int, *, is_inflight: bool = False) -> None:
        """Pass a model's weights on to a new sampling session, as its worker does."""
        folder = self.samplers.new_folder()
        passed = self.samplers.to_pass(MODEL, number, folder, b"", is_inflight=is_inflight)
        folder.mkdir()
        passed.write()
        await self.samplers.add_passed(passed)

    async def ask(self, seq: int, sampler: str | None = SAMPLER, **fields: Any) -> Any:
        """Ask for a sample; returns the id of the future."""
        prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=fields.pop("tokens", [1, 2]))])
        asked = types.SampleRequest(
            sampling_session_id=sampler, seq_id=seq, num_samples=1, prompt=prompt,
            sampling_params=types.SamplingParams(max_tokens=1), **fields,
        )  # fmt: skip
        return (await self.samplers.sample(LOCAL, asked))["request_id"]

    async def answer(self, identity: str) -> tuple[bool, bytes]:
        """Whether a request failed, and what its future has."""
        promise = self.promises.find(LOCAL.name, identity)
        await promise.moved.wait()
        return promise.failed, promise.content

    def end_session(self) -> None:
        self.store.registry.sessions.change(LOCAL.name, "s", status={"type": "client_finished"})
        self.samplers.end_session("s")

    async def settled(self) -> None:
        """Wait until nothing is under way."""
        while self.samplers._tasks:
            await asyncio.wait([*self.samplers._tasks])


def run(root: Path, scenario: Callable[[Server], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await scenario(Server(root))

    asyncio.run(asyncio.wait_for(all_of_it(), 30))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def nothing_is_kept(server: Server) -> bool:
    return not (server.engines.there or server.samplers._adapters or server.store._pins)


# requests that wait for their turn ---------------------------------------------------------------------------------


def test_requests_that_wait_while_their_checkpoint_is_deleted_are_answered_by_it(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        futures = [await server.ask(seq) for seq in range(3)]
        futures.append(await server.ask(3, None, model_path=PATH.text))
        await until(lambda: server.engines.asked)
        server.store.delete(LOCAL.name, PATH)
        server.samplers.expire()
        server.engines.sampling.set()
        assert not any([(await server.answer(future))[0] for future in futures])
        (loaded,) = {*server.engines.loads}
        assert server.engines.asked == [loaded] * 4
        await server.settled()
        assert nothing_is_kept(server)

    run(tmp_path, scenario)


@pytest.mark.parametrize("kind", ["checkpoint", "passed", "inflight", "base"])
def test_requests_that_wait_while_their_session_ends_are_refused(tmp_path: Path, kind: str) -> None:
    async def scenario(server: Server) -> None:
        if kind in ("passed", "inflight"):
            await server.pass_on(0, is_inflight=kind == "inflight")
        else:
            await (server.create() if kind == "checkpoint" else server.create(None, "base"))
        futures = [await server.ask(seq) for seq in range(3)]
        await until(lambda: server.engines.asked)
        server.end_session()
        server.engines.sampling.set()
        (failed, _), *waited = [await server.answer(future) for future in futures]
        assert not failed, "engines had it already"
        assert all(failed and f"sampler {SAMPLER} does not exist, or has expired" in str(content) for failed, content in waited)
        assert len(server.engines.asked) == 1
        await server.settled()
        assert nothing_is_kept(server)
        assert not server.promises._queues, "nobody polls for what it has completed"
        assert not [*(tmp_path / "scratch").iterdir()] if kind in ("passed", "inflight") else True

    run(tmp_path, scenario)


def test_a_sampler_whose_requests_wait_is_not_idle(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.pass_on(0)
        await server.pass_on(1)
        futures = [await server.ask(seq) for seq in range(2)]
        await until(lambda: server.engines.asked)
        session = server.samplers.sessions[SAMPLER]
        session.used -= 10_000
        server.samplers.expire()
        assert not session.over
        server.engines.sampling.set()
        assert not any([(await server.answer(future))[0] for future in futures])
        assert None not in server.engines.asked
        await server.settled()
        session.used -= 10_000
        server.samplers.expire()
        assert "was not used for 3600 s" in session.over

    run(tmp_path, scenario)


def test_a_request_that_is_cancelled_before_it_begins_keeps_no_adapters(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        identity = await server.ask(0)
        server.promises.cancel(LOCAL.name, identity)
        server.end_session()
        await server.settled()
        assert server.engines.asked == []
        assert nothing_is_kept(server)

    run(tmp_path, scenario)


# sessions that are made while engines load -------------------------------------------------------------------------


def test_a_sampling_session_that_is_asked_for_twice_while_engines_load_is_made_once(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.engines.loading.clear()
        twice = [asyncio.create_task(server.create()) for _ in range(2)]
        await until(lambda: server.engines.loads)
        server.engines.loading.set()
        first, second = await asyncio.gather(*twice)
        assert first == second == {"sampling_session_id": SAMPLER, "type": "create_sampling_session"}
        (adapter,) = server.samplers._adapters.values()
        assert adapter.users == 1
        server.end_session()
        await server.settled()
        assert nothing_is_kept(server)

    run(tmp_path, scenario)


def test_another_sampling_session_of_a_number_is_refused_while_engines_load_the_first(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.engines.loading.clear()
        first = asyncio.create_task(server.create())
        await until(lambda: server.engines.loads)
        await server.create(None, "base")
        server.engines.loading.set()
        with pytest.raises(RequestError, match="sampling_session_seq_id is 0, which came before with other content"):
            await first
        assert server.samplers.sessions[SAMPLER].adapter is None
        await server.settled()
        assert nothing_is_kept(server)

    run(tmp_path, scenario)


def test_a_session_that_ends_while_engines_load_for_it_keeps_no_adapters(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.engines.loading.clear()
        made = asyncio.create_task(server.create())
        passed = asyncio.create_task(server.pass_on(1))
        await until(lambda: len(server.engines.loads) == 2)
        server.end_session()
        server.engines.loading.set()
        for one in (made, passed):
            with pytest.raises(RequestError, match="session s is over"):
                await one
        assert not server.samplers.sessions
        await server.settled()
        assert nothing_is_kept(server)
        assert not [*(tmp_path / "scratch").iterdir()]

    run(tmp_path, scenario)


def test_a_session_of_the_server_before_that_ends_while_engines_load_for_it_keeps_no_adapters(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.store.registry.samplers.add(SamplerRecord(SAMPLER, LOCAL.name, 2.0, "s", "base", PATH.text))
        server.samplers.restore()
        server.engines.loading.clear()
        asked = asyncio.create_task(server.ask(0))
        await until(lambda: server.engines.loads)
        server.samplers.end_session("s")
        server.engines.loading.set()
        failed, content = await server.answer(await asked)
        assert failed
        assert f"sampler {SAMPLER} does not exist, or has expired" in str(content)
        await server.settled()
        assert nothing_is_kept(server)

    run(tmp_path, scenario)


def test_two_models_do_not_pass_weights_on_to_one_sampling_session(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.engines.loading.clear()
        both = [asyncio.create_task(server.pass_on(0)) for _ in range(2)]
        await until(lambda: len(server.engines.loads) == 2)
        server.engines.loading.set()
        first, second = await asyncio.gather(*both, return_exceptions=True)
        assert first is None
        assert str(second) == "sampling_session_seq_id is 0, which was used before"
        await server.settled()
        (kept,) = server.engines.there
        assert kept == server.engines.loads[0]
        server.end_session()
        await server.settled()
        assert nothing_is_kept(server)

    run(tmp_path, scenario)


def test_two_requests_of_one_number_at_once_are_one_and_a_refusal(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.create()
        server.engines.sampling.set()
        first, second = await asyncio.gather(server.ask(0), server.ask(0, tokens=[3, 4]))
        answers = [await server.answer(identity) for identity in (first, second)]
        assert sorted(failed for failed, _ in answers) == [False, True]
        assert "seq_id is 0, which came before with other content" in str(max(answers)[1])
        assert len(server.engines.asked) == 1

    run(tmp_path, scenario)
