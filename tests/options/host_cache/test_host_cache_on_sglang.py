"""A real SGLang server on a CPU whose first cache is too small: what it finds in main memory, and what an update leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from tests.rollout.tiny import largest_difference, load, sync, weights_of

PROMPTS = [[10 + number, *range(100, 159)] for number in range(8)]
"""Eight of 60 tokens, which begin with another token each; the first cache holds four."""


@pytest.mark.slow
def test_prompts_come_back_from_main_memory_until_the_weights_change(tiny_path: Path, tmp_path: Path) -> None:
    extra = {"enable_hierarchical_cache": True, "hicache_size": 0, "hicache_ratio": 8.0}  # a size is 1 GB at least
    sizes = {"threads": 1, "max_total_tokens": 256, "max_running_requests": 4, "start_timeout_s": 240.0}
    options = ServerOptions(str(tiny_path), tmp_path / "server.log", extra=extra, **sizes)  # type: ignore[arg-type]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)

    async def scenario() -> None:
        engine = await SglangEngine.open(options, initial_version=0)

        async def ask() -> list[Generation]:
            """The answers one after the other."""
            return [(await engine.generate(EngineRequest([prompt], params)))[0][0] for prompt in PROMPTS]

        try:
            first, again = await ask(), await ask()
            assert [answer.prefill.cached for answer in first] == [0] * 8
            assert [answer.prefill.cached for answer in again] == [59] * 8  # all but the last, which is computed for logits
            for answers in (first, again):
                assert largest_difference(load(tiny_path), PROMPTS, [[answer] for answer in answers]) < 1e-5
            new = load(tiny_path, seed=3)
            await sync(engine, weights_of(new), 1)
            behind, once_more = await ask(), await ask()
            assert [answer.prefill.cached for answer in behind] == [0] * 8
            assert [answer.prefill.cached for answer in once_more] == [59] * 8
            for answers in (behind, once_more):
                assert largest_difference(new, PROMPTS, [[answer] for answer in answers]) < 1e-5
        finally:
            await engine.stop()

    asyncio.run(scenario())
