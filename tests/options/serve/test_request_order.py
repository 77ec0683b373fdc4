"""Orders of requests: by number in each model, by turns among clients."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest

from megarl.options.serve.request_order import FairQueue, FairSlots, Lane
from megarl.options.serve.values import RequestError


def offered(lane: Lane[int], seq: int) -> list[int]:
    digest = bytes([seq])
    assert not lane.is_repeated(seq, digest)
    return lane.offer(seq, digest, seq, now=0.0)


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_requests_take_effect_in_the_order_of_their_numbers(order: tuple[int, ...]) -> None:
    lane: Lane[int] = Lane()
    assert [ready for seq in order for ready in offered(lane, seq)] == [0, 1, 2, 3]


def test_a_repeated_request_is_known_waiting_or_done_and_other_content_is_refused() -> None:
    lane: Lane[int] = Lane()
    assert offered(lane, 1) == []
    for _ in range(2):
        assert lane.is_repeated(1, bytes([1]))
        with pytest.raises(RequestError, match="seq_id is 1, which came before with other content"):
            lane.is_repeated(1, b"other")
        offered(lane, 0) if lane.next == 0 else None
    assert lane.next == 2


def test_a_number_that_is_over_and_unknown_is_refused() -> None:
    lane: Lane[int] = Lane(first=7)
    with pytest.raises(RequestError, match="seq_id is 6, but the model's next is 7"):
        lane.is_repeated(6, b"")


def test_a_request_that_was_not_taken_may_come_again_and_one_that_is_too_late_may_not() -> None:
    lane: Lane[int] = Lane(first=7)
    lane.remember(8, b"other")
    lane.forget(8)
    assert offered(lane, 8) == []
    assert lane.overdue(1e9, 1.0) == ([8], 7)
    with pytest.raises(RequestError, match="too late"):
        lane.offer(7, b"\x07", 7, 0.0)


def test_requests_do_not_wait_for_ever_for_one_that_never_comes() -> None:
    lane: Lane[int] = Lane()
    offered(lane, 0)
    lane.is_repeated(3, b"3")
    lane.offer(3, b"3", 3, now=10.0)
    assert lane.overdue(19.0, 10.0) == ([], 1)
    assert lane.overdue(21.0, 10.0) == ([3], 1)
    with pytest.raises(RequestError, match="seq_id is 1, but the model's next is 4"):
        lane.is_repeated(1, b"1")
    assert offered(lane, 4) == [4]


def test_ten_jobs_of_one_client_do_not_wait_for_ten_thousand_of_another() -> None:
    async def work() -> list[str]:
        queue: FairQueue[str] = FairQueue()
        for number in range(10_000):
            queue.put("t", "big", f"big {number}")
        for number in range(10):
            queue.put("t", "small", f"small {number}")
        return [await queue.take() for _ in range(10_010)]

    taken = asyncio.run(work())
    assert [place for place, job in enumerate(taken) if job.startswith("small")] == [*range(1, 21, 2)]
    assert [job for job in taken if job.startswith("big")] == [f"big {number}" for number in range(10_000)]


def test_a_job_that_goes_on_with_the_last_one_comes_before_turns_and_never_before_its_own() -> None:
    def goes_on(last: str) -> Callable[[str], bool | None]:
        return lambda job: job[1] == "o" if job[0] == last[0] else None

    async def work() -> list[str]:
        queue: FairQueue[str] = FairQueue()
        for job in ("a1", "b1", "ao", "a2", "ao", "bo"):
            queue.put("t", "big", job)
        for job in ("c1", "co"):
            queue.put("t", "small", job)
        taken = [" "]
        while len(taken) < 9:
            taken.append(await queue.take(goes_on(taken[-1])))
        return taken[1:]

    assert asyncio.run(work()) == ["a1", "ao", "c1", "co", "b1", "bo", "a2", "ao"]


def test_places_go_to_the_client_that_has_the_fewest() -> None:
    async def work() -> list[str]:
        slots, order = FairSlots(4), []

        async def request(client: str) -> None:
            async with slots.slot("t", client):
                order.append(client)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(request("big")) for _ in range(1000)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(request("small")) for _ in range(10)]
        await asyncio.gather(*tasks)
        return order

    order = asyncio.run(work())
    assert len(order) == 1010
    assert max(place for place, client in enumerate(order) if client == "small") < 40


@pytest.mark.parametrize("place", [("tenant", "busy"), ("busy", "client")], ids=["client", "tenant"])
def test_places_that_one_had_before_do_not_count_against_it(place: tuple[str, str]) -> None:
    """The first in the line is next, whatever it has done before."""
    new = ("tenant", "new") if place[0] == "tenant" else ("new", "client")

    async def work() -> list[tuple[str, str]]:
        slots, order = FairSlots(1), []

        async def request(tenant: str, client: str) -> None:
            async with slots.slot(tenant, client):
                order.append((tenant, client))

        for _ in range(10):
            await request(*place)
        async with slots.slot("now", "now"):
            tasks = [asyncio.create_task(request(*one)) for one in (place, new)]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return order[10:]

    assert asyncio.run(work()) == [place, new]


def test_cancelled_requests_leave_no_place_taken() -> None:
    async def work() -> None:
        slots, chance = FairSlots(2), random.Random(0)
        running: list[int] = []

        async def request(number: int) -> None:
            async with slots.slot("t", number % 3):
                running.append(number)
                assert len(running) <= 2
                await asyncio.sleep(0.0001)
                running.remove(number)

        async def guarded(number: int) -> None:
            try:
                await request(number)
            finally:
                if number in running:
                    running.remove(number)

        tasks = [asyncio.create_task(guarded(number)) for number in range(200)]
        for task in chance.sample(tasks, 120):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots._taken == 0
        async with asyncio.timeout(1), slots.slot("t", "a"), slots.slot("u", "b"):
            pass

    asyncio.run(work())
