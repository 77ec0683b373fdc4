"""The sampler on a real SGLang server on a CPU, against transformers and PEFT in float32: base, adapters of several ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from megarl.options.serve.asked_bodies import EngineLimits
from megarl.options.serve.engine_arguments import adapter_room, seed_arguments
from megarl.options.serve.sampler import SglangSampler
from megarl.options.serve.values import RequestError, Sampled, SampleRequest
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from tests.data.chat_tokenizers import byte_tokenizer
from tests.rollout.midway import midway
from tests.rollout.tiny import TINY, load, save_tiny

pytestmark = pytest.mark.slow
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {"narrow": (2, LINEAR), "wide": (5, [*LINEAR, "lm_head"]), "attention": (3, ["q_proj", "v_proj"])}
PROMPT = [5, 6, 7, 8, 300, 9, 10, 11, 12]
NEVER_ENDS: tuple[int, ...] = ()
T = TypeVar("T")


@dataclass(eq=False)
class Engine:
    """An engine of this process as the sampler asks it; `restarts` counts how often it was started again."""

    options: ServerOptions
    engine: SglangEngine
    restarts: int = 0

    async def endpoint(self, deadline_s: float) -> Any:
        return self.engine.endpoint

    async def health(self, *, deadline_s: float) -> None:
        await self.engine.health()

    async def restart(self, deadline_s: float) -> None:
        await self.engine.stop()
        self.engine = await SglangEngine.open(self.options, initial_version=0)
        self.restarts += 1


@dataclass(eq=False)
class Served:
    """A server with the sampler on it, the models that it is compared with, and the loop in which it is asked."""

    engine: Engine
    sampler: SglangSampler
    models: dict[str | None, Any]
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 240))

    def sample(self, **fields: Any) -> Sampled:
        return self.run(self.sampler.sample(request(**fields)))

    def log_probs(self, adapter: str | None, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """`[tokens, V]`: those of the token behind each."""
        with torch.no_grad():
            return (self.models[adapter](torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)


def request(**fields: Any) -> SampleRequest:
    chosen: dict[str, Any] = {"tokens": PROMPT, "max_tokens": 12, "stop": NEVER_ENDS} | fields
    return SampleRequest(np.asarray(chosen.pop("tokens"), dtype=np.int32), **chosen)


def write_adapters(folder: Path, model: Path, rank: int, targets: list[str], seed: int) -> None:
    """A PEFT folder of random adapters that matter."""
    made = get_peft_model(load(model), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in made.named_parameters():
            if "lora_" in name:
                values.copy_(0.1 * torch.randn(values.shape, generator=drawn))
    made.save_pretrained(str(folder), save_embedding_layers=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    model = save_tiny(root / "model", TINY)
    byte_tokenizer().save_pretrained(str(root / "tokenizer"))
    models: dict[str | None, Any] = {None: load(model)}
    for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
        write_adapters(root / name, model, rank, targets, seed)
        models[name] = PeftModel.from_pretrained(load(model), str(root / name)).eval()
    # room for two adapters in a pass and three in all, though there are as many again
    extra = seed_arguments() | adapter_room(LINEAR, 8, 2)
    sizes = {"threads": 1, "max_total_tokens": 16384, "max_running_requests": 16, "start_timeout_s": 500}
    options = ServerOptions(str(model), root / "server.log", extra=extra, **sizes)  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    engine = Engine(options, loop.run_until_complete(SglangEngine.open(options, initial_version=0)))
    limits = EngineLimits(1024, TINY.vocab_size, str(root / "tokenizer"), (2,))
    sampler = SglangSampler([engine], limits, most_adapters=2, max_rank=8)
    made = Served(engine, sampler, models, loop)
    try:
        for name in ADAPTERS:
            made.run(sampler.add(name, root / name))
        yield made
    finally:
        loop.run_until_complete(sampler.close())
        loop.run_until_complete(engine.engine.stop())
        loop.close()


def greedy(served: Served, adapter: str | None, count: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(served.log_probs(adapter, ids)[-1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_greedy_tokens_and_log_probs_are_those_of_peft(served: Served, adapter: str | None) -> None:
    sampled = served.sample(adapter=adapter, temperature=0.0, topk_sample_logprobs=4)
    [answer] = sampled.sequences
    expected = greedy(served, adapter, 12)
    assert answer.tokens.tolist() == expected
    assert (answer.tokens.dtype, answer.logprobs.dtype, answer.stop_reason) == (np.int32, np.float32, "length")
    rows = served.log_probs(adapter, [*PROMPT, *expected])[len(PROMPT) - 1 : -1]
    assert np.abs(answer.logprobs - rows.gather(1, torch.tensor(expected)[:, None])[:, 0].numpy()).max() < 1e-4
    values, ids = rows.topk(4)
    assert answer.topk is not None
    assert answer.topk[0].tolist() == ids.tolist()
    assert np.abs(answer.topk[1] - values.numpy()).max() < 1e-4
    if adapter is not None:
        assert expected != greedy(served, None, 12), "the adapters change nothing"


def test_requests_of_all_adapters_at_once_have_each_its_own(served: Served) -> None:
    """More than a pass, or the server, holds at once."""

    async def all_of_them() -> list[Sampled]:
        names = [None, *ADAPTERS] * 4
        return await asyncio.gather(*(served.sampler.sample(request(adapter=name, temperature=0.0)) for name in names))

    expected = [greedy(served, name, 12) for name in (None, *ADAPTERS)]
    assert [one.sequences[0].tokens.tolist() for one in served.run(all_of_them())] == expected * 4


def test_one_pass_over_prompts_of_several_adapters_gives_each_row_its_own(served: Served) -> None:
    """The output layer is computed for some of the pass's rows: all of a prompt that is scored, the last one of another."""
    asked: list[tuple[str | None, bool]] = [
        ("wide", False),
        (None, True),
        ("narrow", False),
        ("wide", True),
        (None, False),
        ("wide", False),
    ]

    async def together() -> list[Sampled]:
        client = served.engine.engine._client
        await client.wait_until_idle()  # a request's last token is answered before the server has put the request away
        await client.pause()
        work = [served.sampler.sample(request(adapter=name, temperature=0.0, prompt_logprobs=on)) for name, on in asked]
        tasks = [asyncio.create_task(one) for one in work]
        await asyncio.sleep(1.0)
        await client.resume()
        return await asyncio.gather(*tasks)

    for held in ("narrow", "wide"):  # the server has them
        served.sample(adapter=held)
    for (name, on), sampled in zip(asked, served.run(together()), strict=True):
        assert sampled.sequences[0].tokens.tolist() == greedy(served, name, 12)
        if on:
            expected = served.log_probs(name, PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
            assert sampled.prompt_logprobs is not None
            assert np.abs(sampled.prompt_logprobs[1:] - expected).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_log_probs_of_samples_are_under_the_temperature_and_of_the_prompt_under_1(served: Served, temperature: float) -> None:
    sampled = served.sample(adapter="wide", temperature=temperature, num_samples=3, prompt_logprobs=True, top_k=20, top_p=0.9)
    for answer in sampled.sequences:
        ids = answer.tokens.tolist()
        rows = served.log_probs("wide", [*PROMPT, *ids], temperature)[len(PROMPT) - 1 : -1]
        assert np.abs(answer.logprobs - rows.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()).max() < 1e-4
        assert all(token in row.topk(20).indices for token, row in zip(ids, rows, strict=True))
    of_prompt = served.log_probs("wide", PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
    assert sampled.prompt_logprobs is not None
    assert np.isnan(sampled.prompt_logprobs[0])
    assert np.abs(sampled.prompt_logprobs[1:] - of_prompt).max() < 1e-4


@pytest.mark.parametrize("adapter", [None, "narrow", "wide"])
@pytest.mark.parametrize("samples", [1, 2])
def test_scores_of_a_prompt(served: Served, adapter: str | None, samples: int) -> None:
    targets = np.full((len(PROMPT) - 1, 3), -1)
    targets[3], targets[5, 1], targets[-1, 2] = (7, 400, 7), 11, 0
    asked: dict[str, Any] = {"adapter": adapter, "num_samples": samples, "max_tokens": 1}
    whole = served.sample(**asked, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=5)
    last = served.sample(**asked, prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=4)
    targeted = served.sample(**asked, target_prompt_logprobs=targets)
    rows = served.log_probs(adapter, PROMPT)[:-1]
    of_prompt = rows.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
    values, ids = rows.topk(3)
    for sampled, first in ((whole, 1), (last, len(PROMPT) - 4)):
        assert sampled.prompt_logprobs is not None
        assert sampled.topk_prompt is not None
        assert np.isnan(sampled.prompt_logprobs[:first]).all()
        assert np.abs(sampled.prompt_logprobs[first:] - of_prompt[first - 1 :]).max() < 1e-4
        assert sampled.topk_prompt[0].tolist() == [[0] * 3] * first + ids[first - 1 :].tolist()
        assert (sampled.topk_prompt[1][:first] == -99999).all()
        assert np.abs(sampled.topk_prompt[1][first:] - values[first - 1 :].numpy()).max() < 1e-4
    assert whole.sequences[0].topk is not None
    assert whole.sequences[0].topk[0].shape == (1, 5)
    expected = np.where(targets >= 0, np.take_along_axis(rows.numpy(), targets.clip(0), axis=1), 0.0)
    assert targeted.target_prompt_logprobs is not None
    assert np.abs(targeted.target_prompt_logprobs - expected).max() < 1e-4
    assert targeted.prompt_logprobs is None
    assert targeted.topk_prompt is None


def test_scores_of_a_prompt_of_one_token_are_none(served: Served) -> None:
    sampled = served.sample(tokens=[5], prompt_logprobs=True, topk_prompt_logprobs=2, max_tokens=1)
    assert sampled.prompt_logprobs is not None
    assert np.isnan(sampled.prompt_logprobs).tolist() == [True]
    assert sampled.topk_prompt is not None
    assert sampled.topk_prompt[0].tolist() == [[0, 0]]


@pytest.mark.parametrize("limits", [{}, {"top_k": 30, "top_p": 0.95}])
def test_a_seed_gives_the_same_answers_whatever_else_is_asked(served: Served, limits: dict[str, Any]) -> None:
    async def beside_others(seed: int) -> list[list[int]]:
        others = [served.sampler.sample(request(adapter=name, **limits)) for name in (None, "narrow", "wide")]
        mine = served.sampler.sample(request(adapter="narrow", seed=seed, num_samples=3, **limits))
        sampled, *_ = await asyncio.gather(mine, *others)
        return [answer.tokens.tolist() for answer in sampled.sequences]

    alone = [answer.tokens.tolist() for answer in served.sample(adapter="narrow", seed=7, num_samples=3, **limits).sequences]
    assert len({*map(tuple, alone)}) == 3, "samples of a request have seeds of their own"
    assert served.run(beside_others(7)) == alone
    assert served.run(beside_others(8)) != alone
    unseeded = served.sample(adapter="narrow", num_samples=4, **limits)
    assert len({tuple(answer.tokens.tolist()) for answer in unseeded.sequences}) == 4


def test_seeded_draws_follow_the_distribution(served: Served) -> None:
    """2,048 first tokens, each by a seed of its own; chi-squared over the likeliest 8 and the rest."""

    async def draws() -> list[int]:
        answers = await asyncio.gather(
            *(served.sampler.sample(request(num_samples=256, max_tokens=1, seed=seed, temperature=0.4)) for seed in range(8))
        )
        return [int(one.tokens[0]) for sampled in answers for one in sampled.sequences]

    drawn = np.bincount(served.run(draws()), minlength=TINY.vocab_size)
    probs = served.log_probs(None, PROMPT, 0.4)[-1].exp().double().numpy()
    likeliest = probs.argsort()[::-1][:8]
    counts = np.append(drawn[likeliest], drawn.sum() - drawn[likeliest].sum())
    expected = drawn.sum() * np.append(probs[likeliest], 1 - probs[likeliest].sum())
    assert ((counts - expected) ** 2 / expected).sum() < 26.1  # 0.999 of chi-squared with 8 degrees of freedom


@pytest.mark.parametrize("adapter", [None, "wide"])
def test_draws_at_a_prompts_positions_are_of_the_distribution_there(served: Served, adapter: str | None) -> None:
    """256 draws at each of four positions; chi-squared over the likeliest 4 and the rest."""
    tokens = PROMPT[:5]
    sampled = served.sample(tokens=tokens, adapter=adapter, prompt_alt_tokens_k=256, temperature=0.4, seed=1, max_tokens=1)
    assert sampled.prompt_alt_tokens is not None
    ids, log_probs = sampled.prompt_alt_tokens
    assert (ids.shape, ids.dtype, log_probs.dtype) == ((4, 256), np.int64, np.float32)
    rows = served.log_probs(adapter, tokens, 0.4)[:-1].numpy()
    assert np.abs(np.take_along_axis(rows, ids, axis=1) - log_probs).max() < 1e-4
    for row, drawn in zip(np.exp(rows.astype(np.float64)), ids, strict=True):
        likeliest = row.argsort()[::-1][:4]
        counts = np.array([(drawn == token).sum() for token in likeliest])
        counts, expected = (np.append(part, whole - part.sum()) for part, whole in ((counts, 256), (256 * row[likeliest], 256)))
        assert ((counts - expected) ** 2 / expected.clip(1e-9)).sum() < 23.5  # 0.9999 of chi-squared with 4 degrees of freedom


def test_stops_are_ids_texts_the_models_own_end_or_none(served: Served) -> None:
    whole = greedy(served, "narrow", 12)
    at = next(i for i in range(3, 12) if whole[i] not in whole[:i])
    by_id = served.sample(adapter="narrow", temperature=0.0, stop=(whole[at],)).sequences[0]
    assert (by_id.tokens.tolist(), by_id.stop_reason) == (whole[: at + 1], "stop")
    decode = byte_tokenizer().decode
    text = decode(whole[: at + 1])[-1:]
    assert text
    first = next(i for i in range(12) if text in decode(whole[: i + 1]))
    by_text = served.sample(adapter="narrow", temperature=0.0, stop=(text,)).sequences[0]
    assert (by_text.tokens.tolist(), by_text.stop_reason) == (whole[: first + 1], "stop")
    served.sampler.limits = replace(served.sampler.limits, ends=(whole[at],))
    try:
        own = served.sample(adapter="narrow", temperature=0.0, stop=None).sequences[0]
        none = served.sample(adapter="narrow", temperature=0.0, stop=()).sequences[0]
    finally:
        served.sampler.limits = replace(served.sampler.limits, ends=(2,))
    assert (own.tokens.tolist(), own.stop_reason) == (whole[: at + 1], "stop")
    assert (none.tokens.tolist(), none.stop_reason) == (whole, "length")


def test_a_cancelled_request_leaves_the_server(served: Served) -> None:
    async def cancelled() -> tuple[int, int]:
        task = await midway(lambda: served.sampler.sample(request(adapter="wide", num_samples=4, max_tokens=900)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.engine.engine._client.wait_until_idle()
        return served.sampler.turns.under_way, sum(one.users for one in served.sampler._adapters.values())

    assert served.run(cancelled()) == (0, 0)


def test_what_the_server_refuses_is_the_clients_sentence(served: Served, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"prompt has 1024 tokens; it must have fewer than the 1024 of the context"):
        served.sample(tokens=[5] * 1024)
    with pytest.raises(RequestError, match=r"the engines refuse the request: .*1022 tokens"):
        served.sample(tokens=[5] * 1022, max_tokens=1)  # SGLang wants a few tokens more
    with pytest.raises(RequestError, match="the sampler 'nobody' is not there"):
        served.sample(adapter="nobody")


def test_a_name_may_get_other_adapters_and_is_dropped(served: Served) -> None:
    folders = {name: adapter.folder for name, adapter in served.sampler._adapters.items()}
    for name in ("narrow", "wide"):
        served.run(served.sampler.add("moving", folders[name]))
        [answer] = served.sample(adapter="moving", temperature=0.0).sequences
        assert answer.tokens.tolist() == greedy(served, name, 12)
    served.run(served.sampler.drop("moving"))
    with pytest.raises(RequestError, match="the sampler 'moving' is not there"):
        served.sample(adapter="moving")


def test_a_server_that_was_killed_has_its_adapters_again(served: Served) -> None:
    before, pid = served.engine.restarts, served.engine.engine.server.pid
    assert pid is not None

    async def killed_meanwhile() -> Sampled:
        task = asyncio.create_task(served.sampler.sample(request(adapter="wide", temperature=0.0, max_tokens=400)))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        return await task

    tokens = served.run(killed_meanwhile()).sequences[0].tokens.tolist()
    assert (len(tokens), tokens[:12]) == (400, greedy(served, "wide", 12))
    assert served.engine.restarts == before + 1
    assert served.sample(adapter="narrow", temperature=0.0).sequences[0].tokens.tolist() == greedy(served, "narrow", 12)
