"""Responses with stops are those of an engine that samples one token after the other and stops there: of both engines, with
drafts, continued ones, and of engines that know no text."""

from __future__ import annotations

import asyncio
import random
import sys
from argparse import Namespace
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megarl.config.rollout import RolloutConfig
from megarl.data.stop_finder import ModelTexts, decode_by
from megarl.data.tokenize import load_tokenizer
from megarl.errors import ConfigError
from megarl.options.prediction.section import SpeculativeConfig
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.engines.sglang import piece_client, text_stops
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.piece_client import PieceClient
from megarl.rollout.engines.stops import NO_STOPS, Stops, ended_at_stops, ended_at_text
from megarl.workers.engine_actor import EngineActor
from megarl.workers.rollouts import Rollouts
from tests.data.chat_tokenizers import byte_tokenizer, ids_of
from tests.options.prediction.drafted import END, exact_distribution, load, p_value, write_model
from tests.rollout.tiny import PROMPTS, sync, weights_of
from tests.rollout.tiny import load as load_tiny

ALPHABET = ["<end>", "a", "ab", "ba"]
DRAWS = 10_000
PROMPT = [1, 2, 1, 2]
STOPS = ("bb", "aba")


def save_words(folder: Path, words: Sequence[str]) -> Any:
    """Give the model in `folder` a tokenizer whose token n is `words[n]`, without spaces between."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0])
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Policies of four tokens that write a and b, and a draft that is nearly sure of something else."""
    parent = tmp_path_factory.mktemp("few-words")
    found = {kind: write_model(parent / kind, kind, 4) for kind in ("llama", "glm4_moe")}
    found["bad"] = write_model(parent / "bad", "llama", 4, seed=5, spread=0.6)
    for folder in found.values():
        save_words(folder, ALPHABET)
    return found


def text_of(ids: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in ids)


def cut(ids: Sequence[int], stops: Sequence[str] = STOPS) -> tuple[int, ...]:
    """The response up to the first token with which it has a stop."""
    lengths = (length for length in range(1, len(ids) + 1) if any(stop in text_of(ids[:length]) for stop in stops))
    return tuple(ids[: next(lengths, len(ids))])


def opened(folders: dict[str, Path], policy: str, algorithm: str, **more: Any) -> EmbeddedEngine:
    algorithm, _, draft = algorithm.partition(":")
    settings = {"algorithm": algorithm, "num_steps": 3, "draft_model": str(folders[draft]) if draft else None}
    speculative = SpeculativeConfig.model_validate(settings)
    return EmbeddedEngine(folders[policy], seed=11, initial_version=0, max_batch_samples=2500, speculative=speculative, **more)


def endless(engine: EmbeddedEngine) -> EmbeddedEngine:
    """The engine without end tokens of the model's own."""
    engine._model.generation_config.eos_token_id = None
    return engine


def drawn(engine: EmbeddedEngine, params: SamplingParams, n: int) -> list[Generation]:
    [responses] = asyncio.run(engine.generate(EngineRequest([PROMPT], params, n=n, keys=["a"])))
    return responses


WAYS = [("llama", "none"), ("llama", "ngram"), ("llama", "standalone:bad"), ("glm4_moe", "mtp")]


@pytest.mark.parametrize(("policy", "algorithm"), WAYS)
def test_responses_with_stops_have_their_exact_probabilities(folders: dict[str, Path], policy: str, algorithm: str) -> None:
    """Chi-square over 10,000 responses against the probabilities of those without stops, each cut by hand; a fixed seed."""
    params = SamplingParams(max_new_tokens=5, stop=STOPS)
    exact = defaultdict[tuple[int, ...], float](float)
    for response, probability in exact_distribution(load(folders[policy]), PROMPT, SamplingParams(max_new_tokens=5)).items():
        exact[cut(response)] += probability
    assert sum(len(one) < 5 and one[-1] != END for one in exact) > 10, "stops end many"
    responses = drawn(opened(folders, policy, algorithm), params, DRAWS)
    assert p_value(responses, exact) > 0.01
    for one in responses:
        has_stop = any(stop in text_of(one.response_ids) for stop in STOPS)
        assert one.finish_reason == ("stop" if has_stop or one.response_ids[-1] == END else "length")
    if algorithm == "none":
        engine = opened(folders, policy, algorithm)
        free = drawn(engine, SamplingParams(max_new_tokens=5), DRAWS)
        assert p_value(free, exact) < 1e-6, "the test sees stops that nobody looked for"
        [late] = ended_at_stops([PROMPT], [free], params, ModelTexts(folders[policy]))
        assert p_value(late, exact) > 0.01, "an engine that knows no text"


@pytest.mark.parametrize(("policy", "algorithm"), WAYS)
@pytest.mark.parametrize("greedy", [False, True])
def test_a_stop_leaves_what_was_sampled_before_it_as_it_is(
    folders: dict[str, Path], policy: str, algorithm: str, greedy: bool
) -> None:
    free = SamplingParams(max_new_tokens=12, greedy=greedy)
    whole = drawn(endless(opened(folders, policy, algorithm)), free, 60)
    found = [text_of(whole[0].response_ids)[5:9]] if greedy else ["abab", "bba"]
    responses = drawn(endless(opened(folders, policy, algorithm)), replace(free, stop=tuple(found)), 60)
    seen = Counter[str]()
    for one, of_free in zip(responses, whole, strict=True):
        expected = cut(of_free.response_ids, found)
        assert tuple(one.response_ids) == expected
        assert one.log_probs == pytest.approx(of_free.log_probs[: len(expected)], abs=1e-5)
        assert one.weight_versions == [0] * len(expected)
        has_stop = any(stop in text_of(expected) for stop in found)
        assert one.finish_reason == ("stop" if has_stop else "length")
        seen[one.finish_reason] += 1
    assert seen["stop"] > 10


def test_the_last_allowed_token_that_completes_a_stop_ends_it_as_one(folders: dict[str, Path]) -> None:
    engine = endless(opened(folders, "llama", "none"))
    [whole] = drawn(engine, SamplingParams(max_new_tokens=6), 1)
    for stop, reason in ((text_of(whole.response_ids), "stop"), ("never", "length")):
        params = SamplingParams(max_new_tokens=6, stop=(stop,))
        [one] = drawn(engine, params, 1)
        assert (one.response_ids, one.finish_reason) == (whole.response_ids, reason)
        decode = decode_by(load_tokenizer(str(folders["llama"])))
        assert ended_at_text(whole, len(PROMPT), params, decode).finish_reason == reason


def test_a_stop_spans_the_pieces_of_a_response_that_is_continued_but_not_its_prompt(folders: dict[str, Path]) -> None:
    engine, params = endless(opened(folders, "llama", "none")), SamplingParams(max_new_tokens=12, stop=("abba", "babb"))
    spanning = 0
    for number, whole in enumerate(drawn(engine, params, 20)):
        for had in range(1, len(whole.response_ids)):
            begun = Generation(whole.response_ids[:had], whole.log_probs[:had], [0] * had, "abort")
            of_group = [[None] * number + [begun]]
            request = EngineRequest([PROMPT], params, n=number + 1, keys=["a"], begun=of_group)
            [responses] = asyncio.run(engine.generate(request))
            one = responses[number]
            assert (one.response_ids, one.finish_reason) == (whole.response_ids, whole.finish_reason)
            assert one.log_probs == pytest.approx(whole.log_probs, abs=1e-5)
            spanning += had > len(whole.response_ids) - 2 and whole.finish_reason == "stop"
    assert spanning > 3
    assert text_of(PROMPT).endswith("aab")
    for one in drawn(engine, SamplingParams(max_new_tokens=1, stop=("aaba", "aabb")), 40):
        assert one.finish_reason == "length"


def test_without_end_tokens_stops_end_nothing(folders: dict[str, Path]) -> None:
    params = SamplingParams(max_new_tokens=9, ignore_eos=True, stop=("a", "b"), stop_token_ids=(1, 2, 3))
    for one in drawn(opened(folders, "llama", "ngram"), params, 5):
        assert (len(one.response_ids), one.finish_reason) == (9, "length")


def test_what_is_cut_has_the_columns_of_its_own_tokens_and_a_picture_s_place_stays_a_cut() -> None:
    decode, ids = decode_by(byte_tokenizer()), ids_of("one. two")
    routes = np.arange(2 + len(ids) - 1, dtype=np.uint8)[:, None, None]
    whole = Generation(ids, [-n / 8 for n in range(8)], [3] * 8, "length", {"routes": routes})
    one = ended_at_text(whole, 2, SamplingParams(max_new_tokens=8, stop=(".",)), decode)
    assert (one.response_ids, one.finish_reason) == (ids_of("one."), "stop")
    assert (one.log_probs, one.weight_versions) == ([0, -1 / 8, -2 / 8, -3 / 8], [3] * 4)
    assert one.extra["routes"][:, 0, 0].tolist() == [*range(2 + 4 - 1)]
    params = SamplingParams(max_new_tokens=8, stop=("o",), cut_token_ids=(ids[-1],))
    cut_short = Generation(ids[-1:], [0.0], [3], "length")
    assert ended_at_text(cut_short, 2, params, decode).finish_reason == "length"
    assert ended_at_text(cut_short, 2, replace(params, cut_token_ids=()), decode).finish_reason == "stop"


# SGLang's servers ---------------------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """Sampling parameters of a request, as SGLang has them."""

    custom_params: Any = None
    stop_token_ids: tuple[int, ...] = ()


class MatchedText:
    """SGLang's finish reason."""

    def __init__(self, matched: str) -> None:
        self.matched = matched


class Request:
    """A request of SGLang's (0.5.23, managers/schedule_batch.py), as far as it ends."""

    def __init__(self, prompt: list[int], sampling: Sampling) -> None:
        self.origin_input_ids_unpadded, self.sampling_params = array("q", prompt), sampling
        self.output_ids = array("q")
        self.finished_reason: Any = None
        self.finished_len: int | None = None

    def _check_str_based_finish(self, new_accepted_len: int = 1) -> bool:
        return False

    def _check_token_based_finish(self, new: Sequence[int]) -> bool:
        for place, token in enumerate(new):
            if token in self.sampling_params.stop_token_ids:
                self.finished_reason, self.finished_len = "token", len(self.output_ids) - len(new) + place + 1
                return True
        return False

    def take(self, tokens: Sequence[int]) -> bool:
        """Take what a pass gave, as `update_finish_state` does."""
        self.output_ids.extend(tokens)
        return self._check_str_based_finish(len(tokens)) or self._check_token_based_finish(tokens)


@pytest.mark.parametrize("tokens_a_pass", [1, 3, 5])
def test_a_server_ends_responses_as_an_engine_that_looks_behind_every_token(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tokens_a_pass: int
) -> None:
    schedule_batch: Any = ModuleType("schedule_batch")
    schedule_batch.Req, schedule_batch.FINISH_MATCHED_STR = type("Req", (Request,), {}), MatchedText
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_batch", schedule_batch)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    text_stops.install()
    numbers, ended = random.Random(7), Counter[str]()
    for _ in range(300):
        ids, had = numbers.choices([1, 1, 1, 2, 3, END], k=numbers.randrange(4, 9)), numbers.randrange(4)
        if END in ids[:had] or cut(ids[:had]) != tuple(ids[:had]) or any(stop in text_of(ids[:had]) for stop in STOPS):
            continue
        sampling = Sampling(stop_token_ids=(END,), **text_stops.asked(STOPS, str(folders["llama"]), had))
        request = schedule_batch.Req([3, 3, *ids[:had]], sampling)
        passes = (ids[start : start + tokens_a_pass] for start in range(had, len(ids), tokens_a_pass))
        has_ended = any(request.take(one) for one in passes)
        until = next((at for at, token in enumerate(ids, start=1) if token == END), len(ids))
        expected = cut(ids[:until])
        kept = (*ids[:had], *request.output_ids[: request.finished_len])
        assert kept == (expected if has_ended else tuple(ids))
        assert has_ended == (expected[-1] == END or any(stop in text_of(expected) for stop in STOPS))
        ended[type(request.finished_reason).__name__] += 1
    assert min(ended["MatchedText"], ended["str"], ended["NoneType"]) > 5
    plain = schedule_batch.Req([1], Sampling())
    assert not plain.take([1, 1, 1]), "a request without texts is SGLang's own matter"


@dataclass
class Server:
    """A server that somebody else started, and knows no text: it says `ids` behind the prompt, as many as it is asked for."""

    ids: list[int]
    prompt: list[int]
    url: str = ""
    alive: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[int, int]] = field(default_factory=list)

    def exit_report(self) -> str:
        return ""

    async def respond(self, request: web.Request) -> web.Response:
        if request.path == "/abort_request":
            return web.json_response({})
        body = await request.json()
        had, most = len(body["input_ids"]) - len(self.prompt), body["sampling_params"]["max_new_tokens"]
        assert body["input_ids"] == [*self.prompt, *self.ids[:had]]
        assert "custom_params" not in body["sampling_params"]
        self.asked.append((had, most))
        said = self.ids[had : had + most]
        reason = "stop" if said[-1] == END else "length"
        log_probs = [[-(had + place) / 8, token] for place, token in enumerate(said)]
        info = {"output_token_logprobs": log_probs, "finish_reason": {"type": reason}, "prompt_tokens": len(body["input_ids"])}
        return web.json_response({"output_ids": said, "meta_info": info})


def served(server: Server, folder: Path, ask: Callable[[PieceClient], Any]) -> Any:
    """What `ask` returns of a client of the server."""

    async def scenario() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.respond)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            return await ask(PieceClient(server, (), str(folder)))
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


@pytest.mark.parametrize("piece", [1, 3, 64])
def test_a_server_that_knows_no_text_is_asked_in_pieces(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(piece_client, "PIECE_TOKENS", piece)
    numbers = random.Random(3)
    for number in range(12):
        ids = [*numbers.choices([1, 2, 3], k=numbers.randrange(4, 12)), END]
        had = number % 3
        begun = Generation(ids[:had], [0.0] * had, [5] * had, "abort") if had and cut(ids[:had]) == tuple(ids[:had]) else None
        server, params = Server(ids, PROMPT), SamplingParams(max_new_tokens=10, stop=STOPS)
        request = EngineRequest([PROMPT], params, keys=["a"], begun=[[begun]])
        [[one]] = served(server, folders["llama"], lambda client, request=request: client.generate(request, 5))
        expected = cut(ids[:10])
        if begun is not None and any(stop in text_of(ids[:had]) for stop in STOPS):
            continue
        assert tuple(one.response_ids) == expected
        begun_tokens = had if begun is not None else 0
        assert one.log_probs[begun_tokens:] == [-place / 8 for place in range(begun_tokens, len(expected))]
        has_stop = any(stop in text_of(expected) for stop in STOPS)
        assert one.finish_reason == ("stop" if has_stop or expected[-1] == END else "length")
        assert server.asked[-1][0] < len(expected) <= server.asked[-1][0] + piece, "nothing is asked for behind the end"


def test_a_response_that_is_cut_between_two_pieces_ends_with_what_it_has(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_client, "PIECE_TOKENS", 2)
    server = Server([1] * 20, PROMPT)

    async def ask(client: PieceClient) -> Any:
        respond = client._post

        async def post(session: Any, endpoint: str, body: dict[str, Any]) -> Any:
            answer = await respond(session, endpoint, body)
            if endpoint == "generate" and len(server.asked) == 3:
                await client.cut(["a"])
            return answer

        client._post = post  # type: ignore[method-assign]
        return await client.generate(EngineRequest([PROMPT], SamplingParams(20, stop=("b",)), keys=["a"]), 5)

    [[one]] = served(server, folders["llama"], ask)
    assert (one.response_ids, one.finish_reason) == ([1] * 6, "abort")


# from the config to the engines -------------------------------------------------------------------------------------


def test_the_sections_and_calls_give_engines_their_stops() -> None:
    rollouts: Any = object.__new__(Rollouts)
    rollouts.config = Namespace(rollout=RolloutConfig(stop=["x"], stop_token_ids=[7], max_new_tokens=9))
    rollouts.tokenizer, rollouts._placeholders, rollouts.asked = byte_tokenizer(), (), []
    rollouts.ask = lambda prompts, params, n: rollouts.asked.append((params.stop, params.stop_token_ids))
    evaluation = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": None, "samples_per_prompt": 1}
    rollouts.config.rollout = rollouts.config.rollout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.workers.rollouts.asked_columns", lambda config: frozenset())
        rollouts.generate([], greedy=True)
        for texts, ids in ((None, None), ((), None), (("y", "z"), (8,)), (None, ())):
            rollouts.sample([], Namespace(**evaluation, stop=texts, stop_token_ids=ids))
        rollouts.answer([], 1)
        rollouts.answer([], 1, stop="y", temperature=0.5)
        rollouts.answer([], 1, stop=[], stop_token_ids=[9])
        for wrong, sentence in (
            ({"stop": ""}, r"sample\.stop\[0\] is '', which would end every response at once"),
            ({"stop_token_ids": [999]}, r"sample\.stop_token_ids\[0\] is 999; it must be below 260"),
        ):
            with pytest.raises(ConfigError, match=sentence):
                rollouts.answer([], 1, **wrong)
        with pytest.raises(ConfigError, match="n is 0"):
            rollouts.answer([], 0)
    end = 1
    assert rollouts.asked == [
        (("x",), (end, 7)),
        (("x",), (end, 7)), ((), (end, 7)), (("y", "z"), (end, 8)), (("x",), (end,)),
        (("x",), (end, 7)), (("y",), (end, 7)), ((), (end, 9)),
    ]  # fmt: skip


def test_a_turn_s_stops_stand_beside_those_of_the_run() -> None:
    params = SamplingParams(5, stop=("x",), stop_token_ids=(1,))
    both = Stops(("y", "x"), (2, 1)).added_to(params)
    assert (both.stop, both.stop_token_ids) == (("x", "y"), (1, 2))
    assert NO_STOPS.added_to(params) is params


def test_an_actor_cuts_what_an_engine_of_the_user_s_own_says_behind_a_stop(folders: dict[str, Path]) -> None:
    class Own:
        async def generate(self, request: EngineRequest) -> Any:
            return [[Generation([1, 2, 3, 3, 1], [0.0] * 5, [4] * 5, "length")] for _ in request.prompts]

    actor = object.__new__(EngineActor.__ray_metadata__.modified_class)
    actor.engine, actor._texts = Own(), ModelTexts(folders["llama"])
    [[one]] = asyncio.run(actor.generate(EngineRequest([PROMPT], SamplingParams(5, stop=("bb",)))))
    assert (text_of(one.response_ids), one.finish_reason) == ("aabba", "stop")
    summaries, tokens, texts = asyncio.run(actor.answer(EngineRequest([PROMPT], SamplingParams(5, stop=("bb",)))))
    assert (summaries[0][0].tokens, summaries[0][0].finish_reason, texts) == (3, "stop", ["aabba"])
    assert tokens.token_ids[tokens.place(0)].tolist() == [1, 2, 3]
    [[one]] = asyncio.run(actor.generate(EngineRequest([PROMPT], SamplingParams(5))))
    assert one.finish_reason == "length"


def test_sglang_and_the_embedded_engine_end_greedy_responses_alike(
    sglang_engine: SglangEngine,
    embedded_engine: EmbeddedEngine,
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where SGLang is given a response to go on with, and where its server is not this run's."""
    numbers = random.Random(5)
    words = ["".join(numbers.choices("abc", k=numbers.randrange(1, 4))) + str(n) for n in range(512)]
    words = [*"abc", *words[3:]]
    tokenizer = save_words(tmp_path, words)

    async def scenario() -> None:
        for engine in (sglang_engine, embedded_engine):
            await sync(engine, weights_of(load_tiny(tiny_path, seed=9)), 300)
        sglang_engine._client.tokenizer_folder = str(tmp_path)
        embedded_engine._texts = ModelTexts(tmp_path)
        free = await embedded_engine.generate(EngineRequest(PROMPTS, SamplingParams(24, greedy=True)))
        ends = zip(free, (5, 11, 17), strict=True)
        stops = {tokenizer.decode(whole.response_ids[:length])[-7:] for (whole,), length in ends}
        params = SamplingParams(24, greedy=True, stop=tuple(stops))
        ours = await embedded_engine.generate(EngineRequest(PROMPTS, params))
        theirs = await sglang_engine.generate(EngineRequest(PROMPTS, params))
        begun = [[Generation(one.response_ids[:3], one.log_probs[:3], [300] * 3, "abort")] for (one,) in free]
        continued = await sglang_engine.generate(EngineRequest(PROMPTS, params, keys=["a", "b", "c"], begun=begun))
        monkeypatch.setattr(piece_client, "PIECE_TOKENS", 2)  # as if somebody else had started the server
        pieces = await PieceClient(sglang_engine.server, (), str(tmp_path)).generate(EngineRequest(PROMPTS, params, n=2), 300)
        assert [second.response_ids for _, second in pieces] == [one.response_ids for one, _ in pieces]
        for (own,), (one,), (again,), (piece, _), (whole,) in zip(ours, theirs, continued, pieces, free, strict=True):
            texts = {length: tokenizer.decode(whole.response_ids[:length]) for length in range(1, 25)}
            first = next(length for length, text in texts.items() if any(stop in text for stop in params.stop))
            found = [own.response_ids, one.response_ids, again.response_ids, piece.response_ids]
            assert found == [whole.response_ids[:first]] * 4
            assert own.log_probs == pytest.approx(one.log_probs, abs=1e-4)
            assert {one.finish_reason, own.finish_reason, again.finish_reason, piece.finish_reason} == {"stop"}
            assert (whole.finish_reason, first < 24) == ("length", True)

    asyncio.run(scenario())
