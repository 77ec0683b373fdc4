"""A real SGLang server of two ranks takes an update of several senders at once, by one request, and says what is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.errors import EngineError
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.weights.digests import by_engine, sums_by_rank
from megarl.weights.group_sender import GroupSender
from megarl.weights.sglang_senders import ServerEndpoint, ServerSender, TensorSender, checksums_of
from megarl.weights.staging import StagedSlices
from tests.rollout.tiny import CONNECTIONS, PROMPTS, Weights, largest_difference, load, weights_of

pytestmark = pytest.mark.slow
SAMPLING = SamplingParams(max_new_tokens=8, ignore_eos=True)
VERSIONS = count(1)
"""Of the weights that the server is sent."""
Damage = tuple[int, int] | None
"""The sender and the rank of the engine between which a byte is changed."""


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessPoolExecutor]:
    """The process of the second sender: torch has one member of a group in a process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


def sender_of(kind: type[ServerSender], endpoint: ServerEndpoint, connection: int, number: int) -> ServerSender:
    if kind is TensorSender:
        return TensorSender(endpoint, timeout_s=120)
    return GroupSender(endpoint, connection=connection, number=number, senders=2, timeout_s=120)


def halves_of(weights: Weights) -> list[Weights]:
    """Each sender's part: every other tensor."""
    return [weights[::2], weights[1::2]]


def send(
    kind: type[ServerSender],
    endpoint: ServerEndpoint,
    connection: int,
    number: int,
    weights: Weights,
    damage: Damage,
    name: str,
) -> dict[Any, str]:
    """Send a part at once; its checksums, taken before a byte of `name` is damaged."""
    sender = sender_of(kind, endpoint, connection, number)
    try:
        staged = sender.staging(f"{number}", 1).stage(sender.pieces(weights))
        staged.checked = True
        checksums = checksums_of(staged)
        if damage is not None and damage[0] == number:
            [at] = [at for at, one in enumerate(staged.pieces) if one.held[:2] == (name, damage[1])]
            values = staged.pieces[at].tensor.clone()
            values.view(-1).view(torch.uint8)[8] ^= 1
            if staged.buffer is None:
                staged.pieces = [*staged.pieces[:at], staged.pieces[at]._replace(tensor=values), *staged.pieces[at + 1 :]]
            else:
                staged.pieces[at].tensor.copy_(values)
        sender.deliver(staged)
        return checksums
    finally:
        sender.close()


def fails(endpoint: ServerEndpoint, connection: int) -> None:
    """A second sender that joins, but does not come to say what it will send."""
    with GroupSender(endpoint, connection=connection, number=1, senders=2, timeout_s=120) as sender:
        sender.join()
        time.sleep(2)
        with mock.patch.object(sender, "_announced", side_effect=EngineError("out of memory")):
            sender.deliver(StagedSlices([]))


async def updated(
    engine: SglangEngine, other: ProcessPoolExecutor, kind: type[ServerSender], model: Any, version: int, damage: Damage = None
) -> None:
    """One update of two senders at the same time."""
    parts, connection = halves_of(weights_of(model)), next(CONNECTIONS)
    name = parts[damage[0]][1][0] if damage is not None else ""
    await engine.begin_update(version)
    second = other.submit(send, kind, engine.endpoint, connection, 1, parts[1], damage, name)
    first = await asyncio.to_thread(send, kind, engine.endpoint, connection, 0, parts[0], damage, name)
    sent = first | await asyncio.wrap_future(second)
    doubtful = await engine.end_update_by_sums(version, by_engine([sums_by_rank(sent)])[0])
    assert [*doubtful] == ([] if damage is None else [damage[1]])
    if doubtful:
        await engine.end_update(version, {box: value for box, value in sent.items() if box.engine_rank in doubtful})


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SglangEngine, list[str]]]:
    """A server of two ranks, and the paths of all requests to it."""
    sizes: dict[str, Any] = {"threads": 1, "max_total_tokens": 2048, "max_running_requests": 8, "start_timeout_s": 240}
    log, asked = tmp_path_factory.mktemp("sglang") / "server.log", list[str]()
    engine = asyncio.run(SglangEngine.open(ServerOptions(str(tiny_path), log, tp=2, **sizes)))
    post = engine._client._post

    async def counting(session: Any, endpoint: str, body: dict[str, Any]) -> Any:
        asked.append(endpoint)
        return await post(session, endpoint, body)

    engine._client._post = counting  # type: ignore[method-assign]
    yield engine, asked
    asyncio.run(engine.stop())


async def answers_as(engine: SglangEngine, model: Any, version: int) -> None:
    groups = await engine.generate(EngineRequest(PROMPTS, SAMPLING, n=2))
    assert largest_difference(model, PROMPTS, groups) < 1e-5
    assert {v for group in groups for one in group for v in one.weight_versions} == {version}


def test_two_ranks_take_what_two_senders_send_at_once_and_a_wrong_byte_on_any_link_is_named(
    tiny_path: Path, server: tuple[SglangEngine, list[str]], other: ProcessPoolExecutor
) -> None:
    async def scenario(engine: SglangEngine, asked: list[str]) -> None:
        versions = VERSIONS
        for kind in (TensorSender, GroupSender):
            version, model = next(versions), load(tiny_path, seed=next(versions))
            asked.clear()
            await updated(engine, other, kind, model, version)
            # one request opens it, one asks for checksums; nothing else of it passes through the server's scheduler
            assert asked.count("update_weights_from_tensor") == 2
            await answers_as(engine, model, version)
            for damage in ((0, 0), (0, 1), (1, 0), (1, 1)):
                names = halves_of(weights_of(model))[damage[0]]
                with pytest.raises(EngineError, match=rf"1 differ, 0 missing.*{names[1][0]}@{damage[1]}"):
                    await updated(engine, other, kind, model, next(versions), damage)
                assert engine.weight_version is None
            version = next(versions)
            await updated(engine, other, kind, model, version)
            await answers_as(engine, model, version)

    asyncio.run(scenario(*server))


def test_a_sender_that_fails_is_not_waited_for_by_the_others_and_the_engine_takes_another_update(
    tiny_path: Path, server: tuple[SglangEngine, list[str]], other: ProcessPoolExecutor
) -> None:
    """Of two senders of a process group one fails before it has sent anything: the engine's ranks wait for it until then."""

    async def scenario(engine: SglangEngine) -> None:
        model, connection = load(tiny_path, seed=3), next(CONNECTIONS)
        part = halves_of(weights_of(model))[0]
        await engine.begin_update(next(VERSIONS))
        second = other.submit(fails, engine.endpoint, connection)
        began = time.monotonic()
        with pytest.raises(EngineError, match="out of memory"):
            await asyncio.to_thread(send, GroupSender, engine.endpoint, connection, 0, part, None, "")
        assert time.monotonic() - began < 100  # of 120 s
        with pytest.raises(EngineError, match="out of memory"):
            second.result()
        await engine.abandon_update()
        assert engine.weight_version is None
        for kind in (GroupSender, TensorSender):
            version = next(VERSIONS)
            await updated(engine, other, kind, model, version)
            await answers_as(engine, model, version)

    asyncio.run(scenario(server[0]))
