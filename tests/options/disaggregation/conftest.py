"""The tiny model, and a pair of real SGLang servers on it: one prefills, one decodes, over NIXL in shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.options.disaggregation.engine import DECODE, MODE, PREFILL, DisaggregatedEngine
from tests.rollout.conftest import _one_thread, tiny_path

__all__ = ["_one_thread", "tiny_path"]


BOUND_S = 400
"""Seconds that a scenario may take: one of them starts a server."""


def options(kind: str, log: Path, **more: Any) -> dict[str, Any]:
    """Arguments of `DisaggregatedEngine.start`, as its `options` gives them."""
    extra: dict[str, Any] = {MODE: kind, "disaggregation_transfer_backend": "nixl"}
    if kind == DECODE:
        extra |= {"disaggregation_decode_enable_radix_cache": True, "disaggregation_decode_retraction_backup": "cpu_tensor"}
    sizes = {"threads": 1, "max_total_tokens": 4096, "max_running_requests": 16, "start_timeout_s": 400}
    return {"log_file": log / f"{kind}.log", **sizes, "extra": extra | more}


class Pair:
    """One engine of each kind, with their loop."""

    def __init__(self, folder: Path, log: Path, **extra: Any) -> None:
        """`extra`: further arguments of both servers."""
        self.folder, self.log, self.extra, self.runner = folder, log, extra, asyncio.Runner()
        self.prefill: DisaggregatedEngine
        self.decode: DisaggregatedEngine

    def run(self, scenario: Callable[[Pair], Awaitable[None]]) -> None:
        """Run a scenario in the loop of the engines."""

        async def bounded() -> None:
            async with asyncio.timeout(BOUND_S):
                await scenario(self)

        self.runner.run(bounded())

    async def start(self) -> None:
        starting = [
            DisaggregatedEngine.start(str(self.folder), initial_version=0, **options(kind, self.log, **self.extra))
            for kind in (PREFILL, DECODE)
        ]
        self.prefill, self.decode = await asyncio.gather(*starting)
        await self.meet()

    async def meet(self) -> None:
        """Have the decoding engine know the other one, as the driver does when weights have changed."""
        await self.decode.meet([await self.prefill.door()])

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """An update of both, in the driver's order; weights are applied inside."""
        await self.decode.begin_update(version)
        await self.prefill.begin_update(version)
        yield
        await asyncio.gather(*(engine.end_update(version) for engine in (self.decode, self.prefill)))
        await self.meet()

    async def stop(self) -> None:
        await asyncio.gather(self.prefill.stop(), self.decode.stop())


@pytest.fixture(scope="module")
def pair(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers, with the weights of the folder as version 0."""
    both = Pair(tiny_path, tmp_path_factory.mktemp("pair"))
    both.runner.run(both.start())
    yield both
    both.runner.run(both.stop())
    both.runner.close()
