"""Turns of tenants at the engines: nobody waits behind somebody else's thousands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megarl.options.serve.tenant_turns import TenantTurns


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_tenant_with_few_requests_does_not_wait_behind_one_with_many() -> None:
    async def scenario() -> None:
        turns, order, gates = TenantTurns(4), list[str](), dict[str, asyncio.Event]()

        async def ask(tenant: str, name: str, samples: int = 1) -> None:
            gates[name] = asyncio.Event()
            async with turns.turn(tenant, samples):
                order.append(name)
                await gates[name].wait()

        many = [asyncio.create_task(ask("many", f"many-{n}")) for n in range(1000)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(ask("few", f"few-{n}")) for n in range(10)]
        await asyncio.sleep(0)
        assert order == [f"many-{n}" for n in range(4)]
        for at in range(40):
            gates[order[at]].set()
            await until(lambda at=at: len(order) == at + 5)  # type: ignore[misc]
        assert max(order.index(f"few-{n}") for n in range(10)) <= 24, "half of the turns are theirs"
        for task in (*many, *few):
            task.cancel()
        await asyncio.gather(*many, *few, return_exceptions=True)
        assert (turns.under_way, turns.waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_request_with_more_samples_than_there_are_at_once_has_its_turn_alone() -> None:
    async def scenario() -> None:
        turns, running = TenantTurns(4), list[int]()

        async def ask(samples: int) -> None:
            async with turns.turn("one", samples):
                running.append(turns.under_way)
                await asyncio.sleep(0.001)

        await asyncio.gather(*(ask(samples) for samples in (2, 9, 2, 2)))
        assert running == [2, 9, 4, 4]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_tenants_have_as_many_samples_under_way_each_not_as_many_requests() -> None:
    async def scenario() -> None:
        turns, order, gates = TenantTurns(8), list[str](), list[asyncio.Event]()

        async def ask(tenant: str, samples: int) -> None:
            async with turns.turn(tenant, samples):
                order.append(tenant)
                gates.append(asyncio.Event())
                await gates[-1].wait()

        tasks = [asyncio.create_task(ask("large", 4)) for _ in range(10)]
        await until(lambda: len(order) == 2)
        tasks += [asyncio.create_task(ask("small", 1)) for _ in range(10)]
        await asyncio.sleep(0)
        gates[0].set()
        await until(lambda: len(order) == 6)
        assert order == ["large"] * 2 + ["small"] * 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (turns.under_way, turns.waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(scenario(), 30))
