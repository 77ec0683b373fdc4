"""Two real SGLang servers on a CPU, one of which prefills for the other: what they answer together, and through an update."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from megarl.errors import EngineError
from megarl.options.disaggregation.engine import PREFILL, DisaggregatedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.system.process_tree import tree_of
from tests.options.disaggregation.conftest import Pair, options
from tests.rollout.midway import midway
from tests.rollout.tiny import PROMPTS, halves, largest_difference, load, reference_log_probs, weights_of

LONG = SamplingParams(max_new_tokens=300, ignore_eos=True)


async def sync(pair: Pair, model: object, version: int) -> None:
    """Give both engines the weights of `model`."""
    async with pair.updating(version):
        for bucket in halves(weights_of(model)):  # type: ignore[arg-type]
            await asyncio.gather(pair.decode.apply_update(bucket), pair.prefill.apply_update(bucket))


@pytest.mark.slow
def test_both_kinds_answer_as_one_engine_and_each_prompt_is_computed_once(pair: Pair) -> None:
    """Log-probs are those of transformers, the first token's too, which the other server sampled."""

    async def scenario(pair: Pair) -> None:
        model = load(pair.folder)
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        groups = await pair.decode.generate(EngineRequest(PROMPTS, params, n=3, keys=["a", "b", "c"]))
        assert largest_difference(model, PROMPTS, groups) < 1e-5
        assert {one.tokens for group in groups for one in group} == {8}
        assert {version for group in groups for one in group for version in one.weight_versions} == {0}
        for prompt, group in zip(PROMPTS, groups, strict=True):
            counts = [one.prefill for one in group]
            assert [count.asked for count in counts] == [len(prompt)] * 3
            assert sorted(count.cached for count in counts) == [0, len(prompt) - 1, len(prompt) - 1]
        with pytest.raises(EngineError, match=r"prefills for others, and answers no requests"):
            await pair.prefill.generate(EngineRequest(PROMPTS, params))
        assert (await pair.prefill.capacity()).responses == 0

    pair.run(scenario)


@pytest.mark.slow
def test_a_turn_finds_the_one_before_at_both_servers(pair: Pair) -> None:
    async def scenario(pair: Pair) -> None:
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        first = [300, 20, 21, 22, 23, 24]
        [[turn]] = await pair.decode.generate(EngineRequest([first], params, keys=["x/0/6"], conversation="x/0"))
        second = [*first, *turn.response_ids, 30, 31]
        [[further]] = await pair.decode.generate(EngineRequest([second], params, keys=["x/0/16"], conversation="x/0"))
        assert further.prefill.asked == len(second)
        assert further.prefill.cached == len(first)  # what was sampled since is known to the other server alone
        assert largest_difference(load(pair.folder), [second], [[further]]) < 1e-5

    pair.run(scenario)


@pytest.mark.slow
def test_end_tokens_and_stop_texts_hold_for_the_token_that_the_other_server_samples(pair: Pair) -> None:
    async def scenario(pair: Pair) -> None:
        params = SamplingParams(max_new_tokens=8, ignore_eos=True, greedy=True)
        [[plain]] = await pair.decode.generate(EngineRequest([PROMPTS[0]], params))
        for place in (0, 3):
            token = plain.response_ids[place]
            first = plain.response_ids.index(token)
            ending = SamplingParams(max_new_tokens=8, greedy=True, stop_token_ids=(token,))
            [[ended]] = await pair.decode.generate(EngineRequest([PROMPTS[0]], ending))
            assert (ended.response_ids, ended.finish_reason) == (plain.response_ids[: first + 1], "stop")

    pair.run(scenario)


@pytest.mark.slow
def test_responses_go_on_through_an_update_and_their_later_tokens_are_those_of_the_new_weights(pair: Pair) -> None:
    old, new = load(pair.folder, seed=5), load(pair.folder, seed=6)
    prompt = PROMPTS[1]

    async def scenario(pair: Pair) -> None:
        await sync(pair, old, 1)
        asked = await midway(lambda: pair.decode.generate(EngineRequest([prompt], LONG, n=2, keys=["a"])))
        await sync(pair, new, 2)
        [group] = await asked
        for one in group:
            assert one.tokens == 300
            assert one.finish_reason == "length"
            under_old = one.weight_versions.count(1)
            assert one.weight_versions == [1] * under_old + [2] * (300 - under_old)
            assert 0 < under_old < 300
            before = reference_log_probs(old, prompt, one.response_ids, 1.0)[:under_old]
            behind = reference_log_probs(new, prompt, one.response_ids, 1.0)[under_old:]
            expected = [*before.tolist(), *behind.tolist()]
            assert max(abs(a - b) for a, b in zip(expected, one.log_probs, strict=True)) < 5e-5

    pair.run(scenario)


@pytest.mark.slow
def test_what_is_cut_goes_on_when_it_is_asked_for_again(pair: Pair) -> None:
    async def scenario(pair: Pair) -> None:
        model = load(pair.folder, seed=7)
        await sync(pair, model, 3)
        asked = await midway(lambda: pair.decode.generate(EngineRequest([PROMPTS[1]], LONG, n=2, keys=["b"])))
        await pair.decode.cut(["b"])
        [begun] = await asked
        assert {one.finish_reason for one in begun} == {"abort"}
        assert all(0 < one.tokens < 300 for one in begun)
        [whole] = await pair.decode.generate(EngineRequest([PROMPTS[1]], LONG, n=2, keys=["b"], begun=[begun]))
        for part, one in zip(begun, whole, strict=True):
            assert one.response_ids[: part.tokens] == part.response_ids
            assert one.tokens == 300
        assert largest_difference(model, [PROMPTS[1]], [whole]) < 5e-5

    pair.run(scenario)


@pytest.mark.slow
def test_weights_of_another_version_prefill_for_nobody(pair: Pair) -> None:
    """The decoding engine waits until there is an engine with its weights; one that says so and has others is not believed."""

    async def scenario(pair: Pair) -> None:
        await sync(pair, load(pair.folder, seed=8), 4)
        door = await pair.prefill.door()
        await pair.decode.meet([door.__class__(**{**door.__dict__, "version": 3})])
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        asked = asyncio.create_task(pair.decode.generate(EngineRequest([PROMPTS[0]], params)))
        await asyncio.sleep(0.5)
        assert not asked.done()
        await pair.prefill._client.name_weights(77)
        await pair.decode.meet([door])
        await asyncio.sleep(1.0)
        assert not asked.done()
        await pair.prefill._client.name_weights(4)
        await pair.decode.meet([door])
        [[answer]] = await asked
        assert answer.weight_versions == [4] * 4

    pair.run(scenario)


@pytest.mark.slow
def test_idle_servers_cost_no_core(pair: Pair) -> None:
    def cpu_s() -> float:
        pids = [engine.server.pid for engine in (pair.prefill, pair.decode)]
        times = [process.cpu_times() for pid in pids if pid is not None for process in tree_of(pid)]
        return sum(one.user + one.system for one in times)

    time.sleep(1)
    began, before = time.monotonic(), cpu_s()
    time.sleep(4)
    assert cpu_s() - before < 0.2 * (time.monotonic() - began)


@pytest.mark.slow
def test_a_server_that_prefills_is_killed_and_responses_wait_for_the_one_that_takes_its_place(
    pair: Pair, tmp_path: Path
) -> None:
    async def scenario(pair: Pair) -> None:
        model = load(pair.folder, seed=9)
        await sync(pair, model, 5)
        assert pair.prefill.server.pid is not None
        psutil.Process(pair.prefill.server.pid).kill()
        asked = asyncio.create_task(pair.decode.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8), n=2)))
        with pytest.raises(EngineError):
            await pair.prefill.health()
        await pair.prefill.stop()
        pair.prefill = await DisaggregatedEngine.start(str(pair.folder), **options(PREFILL, tmp_path))
        assert not asked.done()
        await pair.prefill.begin_update(5)
        for bucket in halves(weights_of(model)):
            await pair.prefill.apply_update(bucket)
        await pair.prefill.end_update(5)
        await pair.meet()
        groups: list[list[Generation]] = await asked
        assert largest_difference(model, PROMPTS, groups) < 1e-5

    pair.run(scenario)
