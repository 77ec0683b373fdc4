"""Responses of the embedded engine that are cut and continued, and what it keeps of conversations between their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from megarl.data.prefills import PrefillCounts
from megarl.option_list import OPTIONS
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.embedded_turns import KeptTurn, TurnCache
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from tests.rollout.tiny import PROMPTS, load, reference_log_probs, sync, weights_of

PARAMS = SamplingParams(max_new_tokens=24, temperature=0.9, ignore_eos=True)
KEYS = ["a", "b", "c"]


async def cut_after(engine: EmbeddedEngine, tokens: int, cut: list[str], begun: Any = None, n: int = 2) -> Any:
    """What the engine answers to the prompts if it is told to cut those called `cut` when it has `tokens` of each response."""
    asked = asyncio.create_task(engine.generate(EngineRequest(PROMPTS, PARAMS, n=n, keys=KEYS, begun=begun)))
    while not engine._under_way or min(len(row.response) for row in engine._under_way[0].rows) < tokens:
        await asyncio.sleep(0)
    await engine.cut(cut)
    return await asked


def test_a_response_that_is_cut_goes_on_as_if_it_had_not_been(tiny_path: Path) -> None:
    """Token for token and log-prob for log-prob, under the same weights; twice cut, and beside responses that were not."""

    async def scenario() -> None:
        engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0)
        whole = await engine.generate(EngineRequest(PROMPTS, PARAMS, n=2, keys=KEYS))
        first = await cut_after(engine, 3, ["a", "c", "nobody's"])
        assert [one.finish_reason for group in first for one in group] == ["abort"] * 2 + ["length"] * 2 + ["abort"] * 2
        assert [one.response_ids for one in first[1]] == [one.response_ids for one in whole[1]]
        second = await cut_after(engine, 9, KEYS, first)
        assert second[1] == first[1]
        third = await engine.generate(EngineRequest(PROMPTS, PARAMS, n=2, keys=KEYS, begun=second))
        for prompt, of_whole, of_first, of_second, of_third in zip(PROMPTS, whole, first, second, third, strict=True):
            for uncut, one, two, three in zip(of_whole, of_first, of_second, of_third, strict=True):
                assert len(one.response_ids) >= 3
                assert three.response_ids == uncut.response_ids
                assert three.response_ids[: len(two.response_ids)] == two.response_ids
                assert two.log_probs[: len(one.log_probs)] == one.log_probs
                assert three.log_probs == pytest.approx(uncut.log_probs, abs=1e-5)
                assert (three.finish_reason, three.weight_versions) == ("length", [0] * 24)
                times = [one, two, three] if one.finish_reason == "abort" else [one]
                behind = [len(prompt), *(len(prompt) + len(cut.response_ids) for cut in times[:-1])]
                assert three.prefill.asked == sum(behind)

    asyncio.run(scenario())


def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it(tiny_path: Path) -> None:
    models = [load(tiny_path), load(tiny_path, seed=1)]

    async def scenario() -> list[list[Generation]]:
        engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0)
        begun = await cut_after(engine, 4, KEYS)
        await sync(engine, weights_of(models[1]), 1)
        return await engine.generate(EngineRequest(PROMPTS, PARAMS, n=2, keys=KEYS, begun=begun))

    for prompt, group in zip(PROMPTS, asyncio.run(scenario()), strict=True):
        for one in group:
            old = one.weight_versions.count(0)
            assert one.weight_versions == [0] * old + [1] * (24 - old)
            assert 4 <= old < 24
            by_version = [reference_log_probs(model, prompt, one.response_ids, 0.9) for model in models]
            expected = torch.cat([by_version[0][:old], by_version[1][old:]])
            assert (torch.tensor(one.log_probs) - expected).abs().max() < 1e-5
            assert (by_version[0] - by_version[1])[old:].abs().max() > 0.1, "the weights must differ for this to say anything"


@pytest.mark.skipif("prediction" not in OPTIONS, reason="asks for the option prediction")
@pytest.mark.parametrize("draft", ["ngram"])
def test_drafts_do_not_keep_a_response_from_going_on(tiny_path: Path, draft: Any) -> None:
    from megarl.options.prediction.section import SpeculativeConfig

    async def scenario() -> list[list[Generation]]:
        settings = SpeculativeConfig(algorithm=draft)
        engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0, speculative=settings)
        begun = await cut_after(engine, 4, KEYS)
        assert all(one.finish_reason == "abort" for group in begun for one in group)
        whole = await engine.generate(EngineRequest(PROMPTS, PARAMS, n=2, keys=KEYS, begun=begun))
        for group, of_begun in zip(whole, begun, strict=True):
            for one, cut in zip(group, of_begun, strict=True):
                assert one.response_ids[: len(cut.response_ids)] == cut.response_ids
        return whole

    model = load(tiny_path)
    for prompt, group in zip(PROMPTS, asyncio.run(scenario()), strict=True):
        for one in group:
            expected = reference_log_probs(model, prompt, one.response_ids, 0.9)
            assert (torch.tensor(one.log_probs) - expected).abs().max() < 1e-5
            assert len(one.response_ids) == 24


# conversations --------------------------------------------------------------------------------------------------------

TOLD = [[31, 32, 33], [77], [50, 51, 52, 53, 54]]
TURN = SamplingParams(max_new_tokens=7, ignore_eos=True)
Step = Callable[[EmbeddedEngine, int], Awaitable[None]]


async def converse(engine: EmbeddedEngine, name: str | None, between: Step | None = None) -> list[tuple[list[int], Generation]]:
    """Turns with what they followed; `between` is awaited after each."""
    ids, turns = list(PROMPTS[1]), []
    for number, told in enumerate([[], *TOLD]):
        ids += told
        [[turn]] = await engine.generate(EngineRequest([ids], TURN, keys=[f"{name}/{len(ids)}"], conversation=name))
        turns.append((list(ids), turn))
        ids += turn.response_ids
        if between is not None:
            await between(engine, number)
    return turns


def counts(turns: list[tuple[list[int], Generation]]) -> list[PrefillCounts]:
    """What was asked, and what an engine has that keeps all but the last token of a turn."""
    ends = [0, *(len(ids) + len(turn.response_ids) - 1 for ids, turn in turns[:-1])]
    return [PrefillCounts(len(ids), had) for (ids, _), had in zip(turns, ends, strict=True)]


def test_later_turns_go_on_from_what_is_kept_and_have_the_log_probs_of_all_of_it(tiny_path: Path) -> None:
    engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0, turn_cache_bytes=2**20)
    turns = asyncio.run(converse(engine, "one"))
    assert [turn.prefill for _, turn in turns] == counts(turns)
    assert turns[1][1].prefill.cached == len(PROMPTS[1]) + 6
    plain = EmbeddedEngine(tiny_path, seed=3, initial_version=0)
    without = asyncio.run(converse(plain, "one"))
    assert [turn.prefill.cached for _, turn in without] == [0] * 4
    assert [turn.response_ids for _, turn in turns] == [turn.response_ids for _, turn in without]
    model = load(tiny_path)
    for ids, turn in turns:
        expected = reference_log_probs(model, ids, turn.response_ids, 1.0)
        assert (torch.tensor(turn.log_probs) - expected).abs().max() < 1e-5


def test_nothing_that_old_weights_computed_is_used_after_an_update(tiny_path: Path) -> None:
    models = [load(tiny_path), load(tiny_path, seed=1)]

    async def after_second_turn(engine: EmbeddedEngine, number: int) -> None:
        if number == 1:
            await sync(engine, weights_of(models[1]), 1)
            assert engine._turns is not None
            assert (len(engine._turns), engine._turns.nbytes) == (0, 0)

    engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0, turn_cache_bytes=2**20)
    turns = asyncio.run(converse(engine, "one", after_second_turn))
    assert [turn.prefill.cached for _, turn in turns][2] == 0
    assert turns[3][1].prefill.cached > 0
    for number, (ids, turn) in enumerate(turns):
        expected = reference_log_probs(models[number >= 2], ids, turn.response_ids, 1.0)
        assert (torch.tensor(turn.log_probs) - expected).abs().max() < 1e-5


def test_an_update_in_the_middle_of_a_turn_leaves_nothing_of_the_old_weights(tiny_path: Path) -> None:
    models = [load(tiny_path), load(tiny_path, seed=1)]

    async def scenario() -> list[tuple[list[int], Generation]]:
        engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0, turn_cache_bytes=2**20)
        [(ids, first), *_] = await converse(engine, "one")
        told = [*ids, *first.response_ids, 9]
        asked = asyncio.create_task(engine.generate(EngineRequest([told], PARAMS, keys=["x"], conversation="one")))
        while not engine._under_way or len(engine._under_way[0].rows[0].response) < 4:
            await asyncio.sleep(0)
        await sync(engine, weights_of(models[1]), 1)
        [[turn]] = await asked
        later = [*told, *turn.response_ids, 8]
        [[last]] = await engine.generate(EngineRequest([later], TURN, keys=["y"], conversation="one"))
        assert last.prefill == PrefillCounts(len(later), len(told) + 23)
        return [(told, turn), (later, last)]

    for temperature, (ids, turn) in zip([0.9, 1.0], asyncio.run(scenario()), strict=True):
        old = turn.weight_versions.count(0)
        by_version = [reference_log_probs(model, ids, turn.response_ids, temperature) for model in models]
        expected = torch.cat([by_version[0][:old], by_version[1][old:]])
        assert (torch.tensor(turn.log_probs) - expected).abs().max() < 1e-5


def test_a_history_that_was_changed_goes_on_from_what_is_left_of_it(tiny_path: Path) -> None:
    async def scenario() -> None:
        engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0, turn_cache_bytes=2**20)
        [(ids, first), *_] = await converse(engine, "one")
        changed = [*ids, *first.response_ids[:3], 200, 201]
        [[turn]] = await engine.generate(EngineRequest([changed], TURN, keys=["x"], conversation="one"))
        assert turn.prefill == PrefillCounts(len(changed), len(ids) + 3)
        expected = reference_log_probs(load(tiny_path), changed, turn.response_ids, 1.0)
        assert (torch.tensor(turn.log_probs) - expected).abs().max() < 1e-5
        [[again]] = await engine.generate(EngineRequest([ids], TURN, keys=["z"], conversation="one"))
        assert again.prefill == PrefillCounts(len(ids), len(ids) - 1), "the last token is computed again, for its logits"
        [[other]] = await engine.generate(EngineRequest([ids], TURN, keys=["z"], conversation="two"))
        assert other.prefill == PrefillCounts(len(ids), 0)
        assert other.log_probs == pytest.approx(again.log_probs, abs=1e-5)

    asyncio.run(scenario())


def test_what_ended_is_freed_and_what_is_used_least_makes_room(tiny_path: Path) -> None:
    token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, size, bytes

    async def scenario() -> None:
        engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0, turn_cache_bytes=30 * token)
        turns = engine._turns
        assert turns is not None
        for name, size in (("a", 4), ("b", 9), ("a", 4)):
            await engine.generate(EngineRequest([[5] * size], TURN, keys=[name], conversation=name))
        assert (len(turns), turns.nbytes) == (2, (4 + 6 + 9 + 6) * token)
        await engine.generate(EngineRequest([[6] * 4], TURN, keys=["c"], conversation="c"))
        assert turns.take("b", [5] * 9) is None, "it was used longest ago"
        assert turns.nbytes == 20 * token
        await engine.end_conversations(["a", "nobody"])
        assert (len(turns), turns.nbytes) == (1, 10 * token)
        await engine.generate(EngineRequest([[6] * 40], TURN, keys=["d"], conversation="d"))
        assert (len(turns), turns.nbytes) == (0, 0), "larger than all there is room for"
        await engine.sleep()

    asyncio.run(scenario())


def test_a_turn_takes_no_more_than_agrees() -> None:
    cache = DynamicCache()
    values = torch.arange(5.0).view(1, 1, 5, 1)
    cache.update(values, -values, 0)
    turns = TurnCache(1000)
    for _ in range(2):  # two turns of one conversation that were under way at once
        turns.keep("a", KeptTurn([1, 2, 3, 4, 5], cache))
        assert (len(turns), turns.nbytes) == (1, 40)
    taken = turns.take("a", [1, 2, 9, 4, 5, 6])
    assert taken is not None
    assert (taken.ids, taken.cache.layers[0].keys.flatten().tolist()) == ([1, 2], [0.0, 1.0])
    assert (len(turns), turns.nbytes) == (0, 0)
    turns.keep("a", taken)
    assert turns.take("a", [9, 2]) is None
