"""What every engine promises, tested through the protocol alone on SGLang and on the embedded engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import DeadlineError, EngineError
from megarl.rollout.engines.protocol import Engine, EngineRequest, Generation, SamplingParams
from tests.rollout.tiny import PROMPTS, halves, largest_difference, load, sync, weights_of, weights_that_never_end

TOLERANCE = 1e-5
LONG = SamplingParams(max_new_tokens=900, stop_token_ids=())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_hugging_face(engine: Engine, tiny_path: Path, temperature: float) -> None:
    async def scenario() -> None:
        model = load(tiny_path)
        await sync(engine, weights_of(model), 3)
        params = SamplingParams(max_new_tokens=12, temperature=temperature)
        groups = await engine.generate(EngineRequest(PROMPTS, params, n=4))
        assert [len(group) for group in groups] == [4, 4, 4]
        assert largest_difference(model, PROMPTS, groups, temperature) < TOLERANCE
        for one in (one for group in groups for one in group):
            assert len(one.response_ids) == 12 or one.finish_reason == "stop"
            assert one.weight_versions == [3] * len(one.response_ids)
        assert len({tuple(one.response_ids) for one in groups[0]}) > 1  # samples of one prompt differ

    asyncio.run(scenario())


def test_greedy_takes_the_likeliest_token_of_hugging_face(engine: Engine, tiny_path: Path) -> None:
    async def scenario() -> None:
        model = load(tiny_path)
        await sync(engine, weights_of(model), 1)
        groups = await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8, greedy=True)))
        for prompt, (one,) in zip(PROMPTS, groups, strict=True):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert one.response_ids == expected[0, len(prompt) :].tolist()
        assert largest_difference(model, PROMPTS, groups) < TOLERANCE

    asyncio.run(scenario())


def test_top_k_limits_what_is_drawn_but_not_the_log_probs(engine: Engine, tiny_path: Path) -> None:
    async def scenario() -> None:
        model = load(tiny_path)
        await sync(engine, weights_of(model), 1)
        groups = await engine.generate(EngineRequest(PROMPTS[:1], SamplingParams(max_new_tokens=1, top_k=2), n=12))
        with torch.no_grad():
            likeliest = model(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(2).indices.tolist()
        assert {one.response_ids[0] for one in groups[0]} <= set(likeliest)
        assert largest_difference(model, PROMPTS[:1], groups) < TOLERANCE

    asyncio.run(scenario())


def test_a_response_ends_with_a_stop_token_unless_told_to_go_on(engine: Engine, tiny_path: Path) -> None:
    async def scenario() -> None:
        await sync(engine, weights_of(load(tiny_path)), 1)
        free = await engine.generate(EngineRequest(PROMPTS[:1], SamplingParams(max_new_tokens=6, greedy=True)))
        third = free[0][0].response_ids[2]
        first = free[0][0].response_ids.index(third)
        stopped = await engine.generate(
            EngineRequest(PROMPTS[:1], SamplingParams(max_new_tokens=6, greedy=True, stop_token_ids=(third,)))
        )
        assert stopped[0][0].response_ids == free[0][0].response_ids[: first + 1]
        assert stopped[0][0].finish_reason == "stop"
        assert free[0][0].finish_reason == "length"
        going_on = SamplingParams(max_new_tokens=6, greedy=True, stop_token_ids=(third,), ignore_eos=True)
        went_on = await engine.generate(EngineRequest(PROMPTS[:1], going_on))
        assert went_on[0][0].response_ids == free[0][0].response_ids
        assert went_on[0][0].finish_reason == "length"

    asyncio.run(scenario())


def test_after_an_update_every_token_is_sampled_by_the_new_weights(engine: Engine, tiny_path: Path) -> None:
    """Also the cache of a prompt seen before must be computed anew: stale caches were off by nats."""

    async def scenario() -> None:
        old, new = load(tiny_path), load(tiny_path, seed=1)
        params = SamplingParams(max_new_tokens=8, temperature=0.7)
        await sync(engine, weights_of(old), 1)
        before = await engine.generate(EngineRequest(PROMPTS, params, n=2))
        await sync(engine, weights_of(new), 2)
        after = await engine.generate(EngineRequest(PROMPTS, params, n=2))
        assert largest_difference(old, PROMPTS, before, 0.7) < TOLERANCE
        assert largest_difference(new, PROMPTS, after, 0.7) < TOLERANCE
        assert largest_difference(old, PROMPTS, after, 0.7) > 0.1  # the check can tell the two apart
        assert {version for group in after for one in group for version in one.weight_versions} == {2}
        assert engine.weight_version == 2

    asyncio.run(scenario())


def test_a_response_under_way_continues_under_new_weights_and_says_so(engine: Engine, tiny_path: Path) -> None:
    async def scenario() -> None:
        old, new = weights_that_never_end(tiny_path), load(tiny_path, seed=2)
        changed = 0
        for wait_s in (0.3, 1.0, 4.0):  # a busy machine may take this long to sample a first token
            await sync(engine, old, 5)
            under_way = asyncio.create_task(engine.generate(EngineRequest(PROMPTS[:1], LONG)))
            await asyncio.sleep(wait_s)
            await sync(engine, weights_of(new), 6)
            ((one,),) = await under_way
            changed = one.weight_versions.index(6)
            if changed:
                break
        assert one.weight_versions == [5] * changed + [6] * (len(one.weight_versions) - changed)
        assert changed > 0
        # the last token sampled under 5 is one the engine had not yet put through the model, so from `changed` on all is new
        prefix = PROMPTS[0] + one.response_ids[:changed]
        model = new
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[0] + one.response_ids])).logits[0, len(prefix) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.response_ids[changed:])[:, None])[:, 0]
        assert (torch.tensor(one.log_probs[changed:]) - expected).abs().max() < 5e-5

    asyncio.run(scenario())


def test_what_is_not_complete_by_the_deadline_is_stopped(engine: Engine, tiny_path: Path) -> None:
    async def scenario() -> None:
        await sync(engine, weights_that_never_end(tiny_path), 1)
        begun = time.monotonic()
        with pytest.raises(DeadlineError, match=r"not complete after 0\.\d+ s: \d+ of 6 responses"):
            await engine.generate(EngineRequest(PROMPTS, LONG, n=2, deadline_s=0.3))
        assert time.monotonic() - begun < 5
        quick = await asyncio.wait_for(
            engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=2), deadline_s=30)), 30
        )
        assert [len(group) for group in quick] == [1, 1, 1]

    asyncio.run(scenario())


def test_no_answer_without_weights_of_a_known_version(engine: Engine, tiny_path: Path) -> None:
    async def scenario() -> None:
        weights = weights_of(load(tiny_path))
        await sync(engine, weights, 1)
        await engine.sleep()
        with pytest.raises(EngineError, match="no weights of a known version"):
            await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=2)))
        with pytest.raises(EngineError, match="sleeps"):
            await engine.begin_update(2)
        await engine.wake()
        with pytest.raises(EngineError, match="no weights of a known version"):
            await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=2)))
        await sync(engine, weights, 2)
        assert len(await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=2)))) == 3

    asyncio.run(scenario())


def test_an_update_that_lacks_a_weight_is_refused_by_name(engine: Engine, tiny_path: Path) -> None:
    async def scenario() -> None:
        weights = weights_of(load(tiny_path))
        await engine.begin_update(7)
        await engine.apply_update([(name, weight) for name, weight in weights if name != "model.norm.weight"])
        with pytest.raises(EngineError, match=r"nobody sent model\.norm\.weight"):
            await engine.end_update(7)
        assert engine.weight_version is None
        with pytest.raises(EngineError, match="no weights of a known version"):
            await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=2)))
        await sync(engine, weights, 8)  # a complete update mends it
        assert engine.weight_version == 8

    asyncio.run(scenario())


def test_updates_out_of_order_are_refused(engine: Engine, tiny_path: Path) -> None:
    async def scenario() -> None:
        weights = weights_of(load(tiny_path))
        with pytest.raises(EngineError, match="call begin_update first"):
            await engine.apply_update(weights)
        await engine.begin_update(9)
        with pytest.raises(EngineError, match="the update to version 9 is still open"):
            await engine.begin_update(10)
        for bucket in halves(weights):
            await engine.apply_update(bucket)
        with pytest.raises(EngineError, match=r"end_update\(10\) does not end"):
            await engine.end_update(10)
        await engine.end_update(9)
        assert engine.weight_version == 9

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[1]], {"n": 0}, "n is 0"),
        ([[1]], {"keys": ["a", "b"]}, "2 keys for 1 prompts"),
    ],
)
def test_requests_that_cannot_be_answered_are_named(prompts: list[list[int]], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        EngineRequest(prompts, SamplingParams(max_new_tokens=2), **arguments)


def test_an_answer_with_a_column_that_no_option_declares_is_refused() -> None:
    known = Generation([7], [-0.5], [1], "stop", {"routes": None})
    assert known.extra == {"routes": None}
    with pytest.raises(EngineError, match=r"the engine answered the column 'mine'; those of options are .*routes"):
        Generation([7], [-0.5], [1], "stop", {"mine": [0.25]})
