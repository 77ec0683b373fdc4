"""The sampler against servers that compute nothing: what they are asked, the adapters that they hold, and the loss of one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.errors import EngineError
from megarl.options.serve.asked_bodies import MOST_TARGETS, EngineLimits
from megarl.options.serve.engine_server import EngineServer
from megarl.options.serve.sampler import SglangSampler
from megarl.options.serve.values import Picture, RequestError, SampleRequest
from tests.options.serve.fake_sglang import FakeEngine, FakeServer

PROMPT = [5, 6, 7, 8]
LIMITS = EngineLimits(64, 100, "tokenizer", (2,), image_token=90)
Scenario = Callable[[SglangSampler, list[FakeEngine]], Awaitable[None]]


def request(tokens: Any = PROMPT, **fields: Any) -> SampleRequest:
    return SampleRequest(np.asarray(tokens, dtype=np.int32), **({"max_tokens": 3} | fields))


def peft_folder(folder: Path, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8} | fields))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@asynccontextmanager
async def sampling(
    servers: int, most_adapters: int, most_samples: int, base: Path | None = None
) -> AsyncIterator[tuple[SglangSampler, list[FakeEngine]]]:
    engines = [FakeEngine(FakeServer(f"token-{number}", most_adapters)) for number in range(servers)]
    for engine in engines:
        await engine.server.start()
    options = {"most_adapters": most_adapters, "max_rank": 8, "most_samples": most_samples, "base": base}
    sampler = SglangSampler(engines, LIMITS, **options)  # type: ignore[arg-type]
    try:
        yield sampler, engines
    finally:
        await sampler.close()
        for engine in engines:
            await engine.kill()


def run(scenario: Scenario, servers: int = 1, most_adapters: int = 2, most_samples: int = 64, base: Path | None = None) -> None:
    async def all_of_it() -> None:
        async with sampling(servers, most_adapters, most_samples, base) as (sampler, engines):
            await scenario(sampler, engines)

    asyncio.run(asyncio.wait_for(all_of_it(), 30))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# what servers are asked ---------------------------------------------------------------------------------------------


def test_a_plain_request_is_one_body_with_every_parameter() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        sampled = await sampler.sample(request(temperature=0.5, top_k=7, top_p=0.75, seed=3, stop=("END", "!")))
        [body] = engines[0].server.asked
        seed = body["sampling_params"].pop("sampling_seed")
        assert body.pop("rid").startswith("serve-")
        assert body == {
            "input_ids": PROMPT,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": 3,
                "temperature": 0.5,
                "top_p": 0.75,
                "top_k": 7,
                "stop_token_ids": [2],
                "ignore_eos": False,
                "custom_params": {"megarl_stop": ["END", "!"], "megarl_tokenizer": "tokenizer", "megarl_begun": 0},
            },
        }
        [answer] = sampled.sequences
        assert (answer.tokens.tolist(), answer.stop_reason, answer.topk) == ([1, 2, 3], "length", None)
        assert np.allclose(answer.logprobs, [-0.1, -0.2, -0.3])
        assert (sampled.cache_hit_tokens, sampled.prompt_logprobs) == (3, None)
        await sampler.sample(request(seed=3, stop=()))
        await sampler.sample(request(stop=(9, 8), top_k=-1, max_tokens=None))
        none, ids = (body["sampling_params"] for body in engines[0].server.asked[1:])
        assert (none["ignore_eos"], none["sampling_seed"]) == (True, seed)
        assert (ids["ignore_eos"], ids["stop_token_ids"], ids["top_k"]) == (False, [2, 9, 8], -1)
        assert ids["max_new_tokens"] == 60, "as many as the context has room for"
        assert ids["sampling_seed"] != seed
        assert "custom_params" not in ids

    run(scenario)


def test_several_samples_find_the_prompt_computed_and_have_seeds_of_their_own() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler.sample(request(num_samples=3, seed=1, prompt_logprobs=True, topk_sample_logprobs=2))
        first, *samples = engines[0].server.asked
        assert first["sampling_params"] == {"max_new_tokens": 0}
        assert first["logprob_start_len"] == 0
        assert len({body["sampling_params"]["sampling_seed"] for body in samples}) == 3
        assert all("logprob_start_len" not in body and body["top_logprobs_num"] == 2 for body in samples)

    run(scenario)


def test_scores_of_a_prompt_are_placed_and_picked() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        asked = {"topk_prompt_logprobs": 2, "topk_sample_logprobs": 4, "prompt_logprobs": True, "prompt_logprobs_last_n": 2}
        sampled = await sampler.sample(request(**asked))
        [body] = engines[0].server.asked
        assert (body["logprob_start_len"], body["top_logprobs_num"]) == (1, 4)
        assert np.array_equal(sampled.prompt_logprobs, [np.nan, np.nan, -2, -3], equal_nan=True)  # type: ignore[arg-type]
        assert sampled.topk_prompt is not None
        assert sampled.topk_prompt[0].tolist() == [[0, 0], [0, 0], [0, 1], [0, 1]]
        assert sampled.topk_prompt[1].tolist() == [[-99999, -99999]] * 2 + [[0, 0]] * 2
        targets = np.array([[-1, -1], [40, 7], [7, -1]])
        sampled = await sampler.sample(request(target_prompt_logprobs=targets))
        scores = engines[0].server.asked[1]
        assert (scores["token_ids_logprob"], scores["logprob_start_len"]) == ([7, 40], 1)
        assert np.allclose(sampled.target_prompt_logprobs, [[0, 0], [-2.04, -2.007], [-3.007, 0]])  # type: ignore[arg-type]
        assert sampled.prompt_logprobs is None

    run(scenario)


def test_draws_at_the_prompts_positions_are_one_body_of_many_requests_with_seeds_of_their_own() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        sampled = await sampler.sample(request(prompt_alt_tokens_k=2, temperature=0.5, seed=3, top_k=4))
        prompt, *others = engines[0].server.asked
        [draws] = [body for body in others if isinstance(body["rid"], list)]
        assert prompt["sampling_params"] == {"max_new_tokens": 0}
        assert draws["input_ids"] == [PROMPT[:1], PROMPT[:1], PROMPT[:2], PROMPT[:2], PROMPT[:3], PROMPT[:3]]
        seeds = {params.pop("sampling_seed") for params in draws["sampling_params"]}
        assert len(seeds) == len({*draws["rid"]}) == 6
        assert draws["sampling_params"] == [{"max_new_tokens": 1, "temperature": 0.5, "ignore_eos": True}] * 6
        assert sampled.prompt_alt_tokens is not None
        assert sampled.prompt_alt_tokens[0].tolist() == [[1, 1]] * 3
        assert sampled.prompt_alt_tokens[1].shape == (3, 2)

    run(scenario)


def test_pictures_are_one_place_each_and_the_server_must_see_as_many_tokens() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        shown = request([5, 0, 0, 0, 6], pictures=(Picture(1, 3, "png", b"pixels"),))
        with pytest.raises(RequestError, match=r"pictures of the prompt make it 0 tokens for the model; it has 5"):
            await sampler.sample(shown)
        [body] = engines[0].server.asked
        assert body["input_ids"] == [5, 90, 6]
        assert body["image_data"] == ["data:image/png;base64,cGl4ZWxz"]
        generate = engines[0].server.generate

        async def seeing(body: dict[str, Any]) -> tuple[int, Any]:
            status, answer = await generate(body)
            return status, answer | {"prompt_token_ids": [5, 90, 90, 90, 6]}

        engines[0].server.generate = seeing  # type: ignore[method-assign]
        assert len((await sampler.sample(shown)).sequences) == 1

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens": []}, "prompt has no tokens; it must have one or more"),
        ({"tokens": [5] * 64}, "prompt has 64 tokens; it must have fewer than the 64 of the context"),
        ({"tokens": [5, 100]}, "prompt has a token id that is not from 0 to 99"),
        ({"tokens": [5, -1]}, "prompt has a token id that is not from 0 to 99"),
        ({"num_samples": 0}, "num_samples is 0; it must be from 1 to 1024"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0 or above"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 or above"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_k": -2}, "top_k is -2; it must be at least 1, or -1 for no limit"),
        ({"stop": ("",)}, "stop has an empty text"),
        ({"stop": (100,)}, "stop has the token id 100; ids must be from 0 to 99"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n is of prompt_logprobs, which is not asked for"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n is 4; it must be from 1 to 3, the"),
        ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs is 101; it must be from 0 to 100 for 4 tokens"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1; it must be from 0 to 100 for 3 tokens"),
        ({"prompt_alt_tokens_k": 1366}, "prompt_alt_tokens_k is 1366; it must be from 0 to 1365 for 4 tokens"),
        (
            {"target_prompt_logprobs": np.zeros((4, 1), int)},
            r"target_prompt_logprobs has the shape \[4, 1\]; it must be \[3, K\]",
        ),
        ({"target_prompt_logprobs": np.full((3, 1), -1)}, "target_prompt_logprobs names no token id"),
        (
            {"target_prompt_logprobs": np.full((3, 1), 100)},
            "target_prompt_logprobs has the token id 100; ids must be below 100",
        ),
        ({"pictures": (Picture(2, 3, "png", b""),)}, "prompt shows a picture at token 2 that is not within its tokens"),
        ({"pictures": (Picture(2, 1, "png", b""),), "prompt_logprobs": True}, "prompt shows a picture; log-probs of such"),
        ({"adapter": "nobody"}, "the sampler 'nobody' is not there, or no more"),
    ],
)
def test_what_no_engine_answers_is_one_sentence_and_reaches_none(fields: dict[str, Any], sentence: str) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        with pytest.raises(RequestError, match=f"^{sentence}"):
            await sampler.sample(request(**fields))
        assert engines[0].server.asked == []

    run(scenario)


def test_ids_at_too_many_positions_are_refused() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        sampler.limits = EngineLimits(5000, 2000, "tokenizer")
        targets = np.tile(np.arange(1000), (2000, 1))
        with pytest.raises(RequestError, match=f"asks for 1000 distinct ids at 2000 positions; .* at most {MOST_TARGETS}"):
            await sampler.sample(request([5] * 2001, target_prompt_logprobs=targets))

    run(scenario)


def test_a_refusal_of_the_server_is_the_clients_and_a_failure_is_not() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        engines[0].server.refuses = "too long by 3"
        with pytest.raises(RequestError, match=r"^the engines refuse the request: 'too long by 3'$"):
            await sampler.sample(request())
        engines[0].server.refuses = ""

        async def failing(body: dict[str, Any]) -> tuple[int, Any]:
            return 500, {"error": {"message": "out of memory"}}

        engines[0].server.generate = failing  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"/generate answered 500: 'out of memory'$"):
            await sampler.sample(request())
        assert engines[0].restarts == 0

    run(scenario)


# several servers ----------------------------------------------------------------------------------------------------


def test_requests_go_to_the_server_with_the_least_to_do() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler._up()
        await until(lambda: all(server.is_up for server in sampler.servers))
        for engine in engines:
            engine.server.gate.clear()
        tasks = [asyncio.create_task(sampler.sample(request(num_samples=n))) for n in (3, 1, 1, 1)]
        await until(lambda: [server.load for server in sampler.servers] == [3, 3])
        for engine in engines:
            engine.server.gate.set()
        await asyncio.gather(*tasks)
        assert [server.load for server in sampler.servers] == [0, 0]

    run(scenario, servers=2)


def test_a_request_on_a_lost_server_goes_to_another_one_and_the_lost_one_gets_its_adapters_again(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler._up()
        await until(lambda: all(server.is_up for server in sampler.servers))
        await sampler.add("a", peft_folder(tmp_path / "a"))
        assert [engine.server.loads for engine in engines] == [["a"], ["a"]]
        engines[0].server.gate.clear()
        task = asyncio.create_task(sampler.sample(request(adapter="a")))
        await until(lambda: engines[0].server.asked)
        await engines[0].kill()
        assert len((await task).sequences) == 1
        assert len(engines[1].server.asked) == 1
        await sampler._up()
        await until(lambda: all(server.is_up for server in sampler.servers))
        assert (engines[0].restarts, engines[1].restarts) == (1, 0)
        assert engines[0].server.loads == [], "not before it is asked"
        engines[1].server.gate.clear()
        tasks = [asyncio.create_task(sampler.sample(request(adapter="a", num_samples=2))) for _ in range(2)]
        await until(lambda: engines[0].server.asked and len(engines[1].server.asked) > 1)
        engines[1].server.gate.set()
        await asyncio.gather(*tasks)
        assert engines[0].server.loads == ["a"]

    run(scenario, servers=2)


def test_a_broken_connection_to_a_server_that_is_well_costs_no_adapters(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler.add("a", peft_folder(tmp_path / "a"))
        sampler.servers[0]._lose(sampler.servers[0]._address)  # type: ignore[arg-type]
        await sampler.sample(request(adapter="a"))
        assert (engines[0].restarts, engines[0].server.loads) == (0, ["a"])
        sampler.servers[0]._held.clear()  # as if the answer to loading had been lost
        await sampler.sample(request(adapter="a"))
        assert engines[0].server.loads == ["a", "a"]

    run(scenario)


def test_a_server_of_somebody_else_at_the_same_address_is_not_asked_twice() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler.sample(request())
        engines[0].server.token = "of another start"
        assert len((await sampler.sample(request())).sequences) == 1
        assert engines[0].calls["endpoint"] == 2

    run(scenario)


def test_where_no_server_starts_the_client_is_told_and_a_later_request_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineServer, "pause_s", 0.05)

    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler.sample(request())
        await engines[0].kill()
        engines[0].fails = 1
        with pytest.raises(EngineError, match=r"engine 0 is lost: no GPU is free"):
            await sampler.sample(request())
        assert len((await sampler.sample(request())).sequences) == 1
        assert engines[0].restarts == 2

    run(scenario)


def test_a_request_that_a_server_gave_up_is_asked_again() -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        generate, left = engines[0].server.generate, [1]

        async def giving_up(body: dict[str, Any]) -> tuple[int, Any]:
            status, answer = await generate(body)
            if left:
                answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "for weights", "x": left.pop()}
            return status, answer

        engines[0].server.generate = giving_up  # type: ignore[method-assign]
        assert (await sampler.sample(request())).sequences[0].stop_reason == "length"
        assert len(engines[0].server.asked) == 2

    run(scenario)


# adapters -----------------------------------------------------------------------------------------------------------


def test_more_adapters_than_a_server_holds_are_loaded_by_least_recent_use(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        for name in "abc":
            await sampler.add(name, peft_folder(tmp_path / name))
        for name in "bcbac":
            await sampler.sample(request(adapter=name))
        assert engines[0].server.loads == [*"abc", "a", "c"]

    run(scenario)


def test_adapters_in_use_are_not_dropped_for_others_nor_by_drop(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        for name in "abc":
            await sampler.add(name, peft_folder(tmp_path / name))
        server = engines[0].server
        server.gate.clear()
        used = [asyncio.create_task(sampler.sample(request(adapter=name))) for name in "bc"]
        await until(lambda: len(server.asked) == 2)
        waiting = asyncio.create_task(sampler.sample(request(adapter="a")))
        dropping = asyncio.create_task(sampler.drop("b"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not dropping.done()
        with pytest.raises(RequestError, match="'b' is not there"):
            await sampler.sample(request(adapter="b"))
        server.gate.set()
        await asyncio.gather(waiting, dropping, *used)
        assert len(server.held) <= 2
        assert len(server.unloads) == 2  # one to load c at first, b

    run(scenario)


def test_one_load_serves_all_who_wait_for_it(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        for name in "abc":
            await sampler.add(name, peft_folder(tmp_path / name))
        await asyncio.gather(*(sampler.sample(request(adapter=name)) for name in "aabbccaa"))
        assert engines[0].server.loads[3:].count("a") == 1

    run(scenario)


def test_a_name_that_gets_other_adapters_leaves_none_behind(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler.add("a", peft_folder(tmp_path / "one"))
        engines[0].server.gate.clear()
        under_way = asyncio.create_task(sampler.sample(request(adapter="a")))
        await until(lambda: engines[0].server.asked)
        adding = asyncio.create_task(sampler.add("a", peft_folder(tmp_path / "two")))
        await until(lambda: sampler._adapters["a"].folder.name == "two")
        later = asyncio.create_task(sampler.sample(request(adapter="a")))
        await until(lambda: len(engines[0].server.asked) == 2)
        engines[0].server.gate.set()
        await asyncio.gather(under_way, adding, later)
        first, second = (body["lora_path"] for body in engines[0].server.asked)
        assert first != second
        assert [*engines[0].server.held] == [second]

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"r": 9}, r"the adapters have the rank 9; it must be from 1 to 8 \(serve.max_rank\)"),
        ({"r": "x"}, "adapter_config.json of the adapters is none of LoRA"),
        ({"use_rslora": True}, "use_rslora of the adapters is set, which the engines do not add exactly"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern of the adapters is set"),
    ],
)
def test_a_folder_that_engines_would_not_add_exactly_is_refused(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        with pytest.raises(RequestError, match=sentence):
            await sampler.add("a", peft_folder(tmp_path / "a", **fields))
        assert engines[0].server.loads == []

    run(scenario)


def test_a_folder_without_safetensors_is_refused_and_nothing_unpickled(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        folder = peft_folder(tmp_path / "a")
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        with pytest.raises(RequestError, match=r"the adapters have no adapter_model.safetensors"):
            await sampler.add("a", folder)

    run(scenario)


def test_a_folder_that_one_server_refuses_is_on_none(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler._up()
        await until(lambda: all(server.is_up for server in sampler.servers))
        engines[1].server.refuses = "shapes differ"
        with pytest.raises(RequestError, match="the engines refuse the request: 'shapes differ'"):
            await sampler.add("a", peft_folder(tmp_path / "a"))
        assert engines[0].server.held == {}
        with pytest.raises(RequestError, match="'a' is not there"):
            await sampler.sample(request(adapter="a"))

    run(scenario, servers=2)


# cancelling ---------------------------------------------------------------------------------------------------------


def test_cancelling_aborts_every_request_in_the_server(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler.add("a", peft_folder(tmp_path / "a"))
        server = engines[0].server
        plain = server.generate
        server.gate.clear()

        async def at_once_for_the_prompt(body: dict[str, Any]) -> tuple[int, Any]:
            if body["sampling_params"]["max_new_tokens"] == 0:
                server.gate.set()
            try:
                return await plain(body)
            finally:
                server.gate.clear()

        server.generate = at_once_for_the_prompt  # type: ignore[method-assign]
        task = asyncio.create_task(sampler.sample(request(num_samples=3, adapter="a")))
        await until(lambda: len(server.asked) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(server.aborted) == sorted(body["rid"] for body in server.asked)
        assert (sampler.turns.under_way, sampler.servers[0].load) == (0, 0)
        await sampler.drop("a")  # nobody uses it any more

    run(scenario)


# all weights --------------------------------------------------------------------------------------------------------


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_server_of_all_weights_that_is_started_again_has_those_that_are_asked_for(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        await sampler.sample(request())
        assert engines[0].server.loads == [], "the base is there"
        for name in ("old", "new"):
            await sampler.add(name, model_folder(tmp_path / name))
        await sampler.sample(request(adapter="new"))
        await engines[0].kill()
        await sampler.sample(request(adapter="new"))
        assert (engines[0].restarts, engines[0].server.loads) == (1, ["new"])
        for name in ("old", None, "new"):
            await sampler.sample(request(adapter=name))
        assert engines[0].server.sampled_with == ["new", "old", "base", "new"]
        assert all("lora_path" not in asked for asked in engines[0].server.asked)
        await sampler.drop("new")
        with pytest.raises(RequestError, match="the sampler 'new' is not there"):
            await sampler.sample(request(adapter="new"))
        with pytest.raises(RequestError, match=r"no config.json, or no safetensors; they must be a model folder"):
            await sampler.add("adapters", peft_folder(tmp_path / "adapters"))

    run(scenario, base=model_folder(tmp_path / "base"))


def test_requests_for_other_weights_wait_and_are_not_kept_out(tmp_path: Path) -> None:
    async def scenario(sampler: SglangSampler, engines: list[FakeEngine]) -> None:
        server = engines[0].server
        await sampler.add("a", model_folder(tmp_path / "a"))
        server.gate.clear()
        tasks = [asyncio.create_task(sampler.sample(request(adapter="a"))) for _ in range(2)]
        await until(lambda: server.sampling == 2)
        tasks += [asyncio.create_task(sampler.sample(request())) for _ in range(2)]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(sampler.sample(request(adapter="a"))) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert server.sampling == 2, "neither those of the base nor those behind them"
        server.gate.set()
        await asyncio.gather(*tasks)
        assert server.sampled_with == ["a", "a", "base", "base", "a", "a"]

    run(scenario, base=model_folder(tmp_path / "base"))
