"""Promises: waiting for answers, their sizes, their ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megarl.options.serve.futures import INLINE_BYTES, PROMISE_BYTES, Promises
from megarl.options.serve.values import RequestError


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main())


def test_a_poll_ends_when_the_answer_is_there_and_else_asks_to_come_again() -> None:
    async def work() -> None:
        promises = Promises(poll_s=0.05)
        promise = promises.make("a", "anna", b"")
        again = await promises.answer("anna", "a", allow_metadata=True)
        assert again.status == 408
        assert json.loads(again.content) == {"type": "try_again", "request_id": "a", "queue_state": "active"}
        waiting = asyncio.create_task(promises.answer("anna", "a", allow_metadata=True))
        await asyncio.sleep(0)
        promises.keep(promise, {"x": 1})
        reply = await asyncio.wait_for(waiting, 0.03)
        assert (reply.status, json.loads(reply.content), reply.media) == (200, {"x": 1}, "application/json")

    run(work)


def test_an_answer_that_is_forgotten_before_who_waits_for_it_reads_it_is_not_an_empty_one() -> None:
    async def work() -> None:
        promises = Promises(keep_bytes=0)
        promise = promises.make("a", "anna", b"")
        waiting = asyncio.create_task(promises.answer("anna", "a", allow_metadata=False))
        await asyncio.sleep(0)
        promises.keep(promise, {"x": 1})
        promises.expire()
        with pytest.raises(RequestError, match="its answer has expired") as raised:
            await waiting
        assert raised.value.status == 410

    run(work)


def test_large_answers_are_announced_with_their_size_first() -> None:
    async def work() -> None:
        promises = Promises()
        content = bytes(INLINE_BYTES + 1)
        promises.keep(promises.make("a", "anna", b""), content)
        size = json.loads((await promises.answer("anna", "a", allow_metadata=True)).content)
        assert size == {"status": "complete_metadata", "request_id": "a", "response_payload_size": len(content)}
        reply = await promises.answer("anna", "a", allow_metadata=False)
        assert (reply.content, reply.media) == (content, "application/x-protobuf")

    run(work)


def test_errors_are_final_and_say_whose_they_are() -> None:
    async def work() -> None:
        promises = Promises()
        promise = promises.make("a", "anna", b"")
        promises.fail(promise, "no", "server")
        promises.keep(promise, {"late": True})
        for _ in range(2):
            reply = await promises.answer("anna", "a", allow_metadata=True)
            assert json.loads(reply.content) == {"error": "no", "category": "server"}

    run(work)


def test_unknown_promises_and_those_of_other_tenants_are_gone_alike() -> None:
    async def work() -> None:
        promises = Promises()
        promises.keep(promises.make("a", "anna", b""), {})
        sentences = []
        for tenant, identity in (("berta", "a"), ("anna", "b")):
            with pytest.raises(RequestError) as refused:
                await promises.answer(tenant, identity, allow_metadata=False)
            assert refused.value.status == 410
            sentences.append(str(refused.value).replace(f" {identity} ", " "))
        assert sentences[0] == sentences[1]

    run(work)


def test_answers_expire_sooner_once_they_were_fetched_and_where_all_are_too_large() -> None:
    async def work() -> None:
        now = 0.0
        promises = Promises(keep_s=100.0, keep_fetched_s=10.0, keep_bytes=1000 + 3 * PROMISE_BYTES, clock=lambda: now)
        for name in "abc":
            promises.keep(promises.make(name, "anna", b""), bytes(100))
        waits = promises.make("waits", "anna", b"")
        await promises.answer("anna", "a", allow_metadata=False)
        now = 11.0
        promises.expire()
        assert [promises.known(name) is not None for name in "abc"] == [False, True, True]
        promises.keep(promises.make("d", "anna", b""), bytes(900))
        promises.expire()
        assert [promises.known(name) is not None for name in "bcd"] == [False, True, True]
        now = 200.0
        promises.expire()
        assert promises.known("waits") is waits
        assert promises.known("d") is None

    run(work)


def test_too_many_requests_that_wait_are_asked_to_come_later() -> None:
    async def work() -> None:
        promises = Promises(most_waiting=1)
        promises.check_room("anna")
        promise = promises.make("a", "anna", b"")
        with pytest.raises(RequestError) as refused:
            promises.check_room("anna")
        assert refused.value.status == 429
        promises.keep(promise, {})
        promises.check_room("anna")

    run(work)


def test_a_poll_of_many_has_what_was_completed_behind_its_cursor() -> None:
    async def work() -> None:
        promises, target = Promises(poll_s=0.2), ("sampler", 0)
        made = [promises.make(name, "anna", b"", target=target) for name in "abc"]
        other = promises.make("other", "anna", b"", target=("sampler", 1))
        promises.keep(other, b"x")
        promises.keep(made[1], b"12345")
        promises.fail(made[0], "no")
        first = await promises.completions("anna", target, 0, None, [])
        assert first["completions"] == [
            {"state": "finished", "request_id": "b", "response_payload_uncompressed_size": 5},
            {"state": "failed", "request_id": "a"},
        ]
        assert await promises.completions("anna", target, 0, None, []) == first
        waiting = asyncio.create_task(promises.completions("anna", target, first["cursor"], None, ["b"]))
        await asyncio.sleep(0.01)
        assert promises.known("b") is None
        promises.keep(made[2], b"")
        found = await waiting
        assert [item["request_id"] for item in found["completions"]] == ["c"]
        empty = await promises.completions("anna", target, found["cursor"], 0, [])
        assert empty == {"completions": [], "cursor": found["cursor"]}

    run(work)


def test_a_cancelled_request_ends_and_others_do_not() -> None:
    async def work() -> None:
        promises, ended = Promises(), []
        for name in "ab":
            promises.make(name, "anna", b"").cancel = lambda name=name: ended.append(name)
        promises.cancel("berta", "a")
        promises.cancel("anna", "unknown")
        assert ended == []
        promises.cancel("anna", "a")
        assert ended == ["a"]
        assert b"cancelled" in (await promises.answer("anna", "a", allow_metadata=True)).content

    run(work)


def test_what_ends_with_a_promise_ends_once_however_it_is_settled() -> None:
    async def work() -> None:
        promises, ended = Promises(), []
        for name, settle in (
            ("kept", lambda promise: promises.keep(promise, {})),
            ("failed", lambda promise: promises.fail(promise, "no")),
            ("cancelled", lambda promise: promises.cancel("anna", promise.id)),
            ("again", lambda promise: promises.settle_again(promise, b"{}", "application/json", failed=False)),
        ):
            promise = promises.make(name, "anna", b"")
            promise.cancel = lambda: None
            promise.at_end.append(lambda name=name: ended.append(name))
            settle(promise)
            assert ended[-1] == name
            promises.fail(promise, "too late")
        assert ended == ["kept", "failed", "cancelled", "again"]

    run(work)


def test_stopping_ends_all_polls_at_once() -> None:
    async def work() -> None:
        promises = Promises(poll_s=60.0)
        promises.make("a", "anna", b"", target=("s", 0))
        one = asyncio.create_task(promises.answer("anna", "a", allow_metadata=True))
        many = asyncio.create_task(promises.completions("anna", ("s", 0), 0, None, []))
        await asyncio.sleep(0.01)
        promises.stop()
        async with asyncio.timeout(1):
            assert (await one).status == 408
            assert (await many)["completions"] == []
            assert (await promises.answer("anna", "a", allow_metadata=True)).status == 408

    run(work)


def test_a_tenant_s_requests_leave_room_for_another_s() -> None:
    async def work() -> None:
        promises = Promises(most_waiting=4, most_of_tenant=3)
        made = [promises.make(f"anna {number}", "anna", b"") for number in range(3)]
        with pytest.raises(RequestError, match="3 requests of anna wait already") as refused:
            promises.check_room("anna")
        assert refused.value.status == 429
        promises.check_room("ben")
        promises.take_back(made[0])
        promises.keep(made[1], {})
        promises.check_room("anna")

    run(work)
