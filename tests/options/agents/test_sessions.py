"""Sessions of agents: whatever their histories do, every sampled token is in one sample, behind the tokens it was sampled
behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.media import Media
from megarl.data.prefills import PrefillCounts
from megarl.data.sample import Prompt, Sample
from megarl.data.stop_finder import decode_by
from megarl.errors import EngineError
from megarl.option_list import OPTIONS
from megarl.options.agents import anthropic_form, openai_form
from megarl.options.agents.episode import samples_of
from megarl.options.agents.messages import RequestError, SessionMessage
from megarl.options.agents.session import REFUSALS, AgentSession, History, SessionLimits
from megarl.options.agents.tree import TurnTree
from megarl.rollout.engines.protocol import Generation, SamplingParams
from megarl.rollout.engines.stops import NO_STOPS, Stops, ended_at_text
from megarl.rollout.episodes.turns import TurnTemplate
from tests.data.chat_tokenizers import CHATML, byte_tokenizer, ids_of

TOKENIZER, END = byte_tokenizer(CHATML), ids_of("<|end|>")[0]
PROMPT = Prompt("train-7", "train-7@2", [1], "a prompt", {"question": "what?"})
DraftCounts = pytest.importorskip("megarl.options.prediction.column").DraftCounts
WIDE = SessionLimits(turns=10_000, context_tokens=1_000_000, response_tokens=1_000_000)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


THINKING = (
    "{%- if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '<tool_call>' }}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{- '}</tool_call>' }}{% endfor %}"
    "{{- '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
"""Keeps the thoughts of turns behind the user's last message and leaves out those before it, as Qwen3's template does."""
THINKER = byte_tokenizer(THINKING)


def template(tools: Sequence[Any]) -> TurnTemplate:
    return TurnTemplate(TOKENIZER, [dict(tool) for tool in tools], "user")


def thinking_template(tools: Sequence[Any]) -> TurnTemplate:
    return TurnTemplate(THINKER, [dict(tool) for tool in tools], "user")


class Recorder:
    """A sampler that says random bytes, or a call of a tool, and remembers what it was asked; token n has log-prob −n/8."""

    def __init__(self, seed: int = 0) -> None:
        self.numbers = random.Random(seed)
        self.asked: list[tuple[list[int], Generation]] = []
        self.sampled = 0
        self.next_text: str | None = None

    async def __call__(self, ids: list[int], most: int, media: Sequence[Media] | None = None, /) -> Generation:
        text = self.next_text
        said = TOKENIZER(text, add_special_tokens=False)["input_ids"] if text else self._bytes()
        turn, reason = ([*said, END][:most], "stop") if most > len(said) else (said[:most], "length")
        places = range(self.sampled, self.sampled + len(turn))
        self.sampled += len(turn)
        drafts = DraftCounts(1, len(turn), len(self.asked))
        generation = Generation(
            turn,
            [-n / 8 for n in places],
            [n // 100 for n in places],
            reason,  # type: ignore[arg-type]
            {"drafts": drafts},
        )
        self.asked.append((list(ids), generation))
        return generation

    def _bytes(self) -> list[int]:
        return [self.numbers.randrange(20, 250) for _ in range(self.numbers.randrange(3, 12))]


def session(recorder: Any, limits: SessionLimits = WIDE) -> AgentSession:
    return AgentSession(limits, recorder, template, Counter())


def written(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
    """What transformers makes of a client's messages."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        calls = [{**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
                 for c in message.get("tool_calls", [])]  # fmt: skip
        shown.append({**message, "content": message["content"] or "", **({"tool_calls": calls} if calls else {})})
    ids = THINKER.apply_chat_template(shown, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids)


def body(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps({"model": "megarl", "messages": messages, **more}))


async def ask(of: AgentSession, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The assistant's message, as a client of OpenAI's gets it."""
    return (await completion(of, messages, **more))["choices"][0]["message"]


async def completion(of: AgentSession, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The chat completion, delivered."""
    turns = await of.answers(openai_form.read_request(body(messages, **more)))
    for turn in turns:
        turn.is_delivered = True
    return json.loads(json.dumps(openai_form.answer(turns, "megarl", 0)))


def told_and_sampled(sample: Sample) -> list[tuple[list[int], list[int], list[float]]]:
    """Each run of sampled tokens: what was before it, the run, its log-probs."""
    ids, start = sample.prompt_ids + sample.response_ids, len(sample.prompt_ids)
    runs, begin = [], None
    for place, is_sampled in enumerate([*sample.sampled_mask, 0]):
        if is_sampled and begin is None:
            begin = place
        if not is_sampled and begin is not None:
            runs.append((ids[: start + begin], ids[start + begin : start + place], sample.rollout_log_probs[begin:place]))
            begin = None
    return runs


async def conversation(seed: int, history: History = "tokens") -> tuple[AgentSession, Recorder]:
    """A client that goes on, asks again, goes back, edits, compacts, calls tools and has helpers, at random; under `template`
    the policy thinks, too."""
    numbers, recorder = random.Random(seed), Recorder(seed)
    is_whole = history == "template"
    of = AgentSession(WIDE, recorder, thinking_template if is_whole else template, Counter(), history)
    open_histories: list[tuple[list[dict[str, Any]], dict[str, Any], list[int]]] = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {seed}"}]
    more: dict[str, Any] = {}
    expected: list[int] = []
    for _ in range(numbers.randrange(1, 9)):
        recorder.next_text = None
        if more and numbers.random() < 0.5:
            recorder.next_text = f'<tool_call>{{"name": "add", "arguments": {{"a": {numbers.randrange(99)}}}}}</tool_call>'
        if is_whole and numbers.random() < 0.8:
            thought = f"<think>\nhm {numbers.randrange(99)}\n</think>\n\n" if numbers.random() < 0.7 else ""
            recorder.next_text = f"{thought}{recorder.next_text or 'well'}"
        message = await ask(of, messages, **more)
        asked, generation = recorder.asked[-1]
        if is_whole:
            assert asked == written(messages, **more), "the policy sees what it would see of any server"
        else:
            assert asked[: len(expected)] == expected, "a history goes on from the tokens that it had"
        whole = asked + generation.response_ids
        if message["content"] and numbers.random() < 0.3:
            message["content"] = f"  {message['content']}\n"  # white space at the ends is nobody's edit
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in message.get("tool_calls", [])]
        said = [*messages, message, *(answers or [{"role": "user", "content": f"more {numbers.random()}"}])]
        open_histories.append((said, more, whole))
        kind = numbers.choice(["on", "on", "on", "again", "back", "edit", "compact", "helper"])
        if kind == "on":
            messages, expected = said, whole
        elif kind == "back":
            messages, more, expected = numbers.choice(open_histories)
            messages = [*messages[:-1], {**messages[-1], "content": f"otherwise {numbers.random()}"}]
        elif kind == "edit":
            place = numbers.randrange(len(said) - 1)
            messages, expected = [*said[:place], {"role": said[place]["role"], "content": "edited"}, *said[place + 1 :]], []
            if messages[place]["role"] == "tool":
                messages[place]["tool_call_id"] = said[place]["tool_call_id"]
        elif kind == "compact":
            messages, expected = [{"role": "user", "content": f"so far: {len(said)} {numbers.random()}"}], []
        elif kind == "helper":
            more = {"tools": TOOLS} if not more else {}
            messages, expected = [{"role": "system", "content": "help"}, {"role": "user", "content": f"{numbers.random()}"}], []
    return of, recorder


@pytest.mark.parametrize("history", ["tokens", "template"])
def test_a_thousand_conversations_are_reassembled_token_for_token(history: History) -> None:
    several = deeper = 0
    for seed in range(1000):
        of, recorder = asyncio.run(conversation(seed, history))
        samples = samples_of(PROMPT, 3, of.tree, TOKENIZER, template(()), 1_000_000, Path())
        several += len(samples) > 1
        deeper += any(turn.parent is not None for turn in of.tree.turns)
        runs = [run for sample in samples for run in told_and_sampled(sample)]
        wanted = [(asked, generation.response_ids, generation.log_probs) for asked, generation in recorder.asked]
        assert sorted(runs) == sorted(wanted), f"seed {seed}"
        assert len({sample.sample_id for sample in samples}) == len(samples)
        both = ([one.extra for one in samples], [turn.extra for _, turn in recorder.asked])
        drafts = [sum((extra.get("drafts", DraftCounts()) for extra in made), DraftCounts()) for made in both]
        assert drafts[0] == drafts[1], "what a draft did for a turn counts where the turn does"
        assert [sample.branch_of for sample in samples] == ["", *["train-7@2/3"] * (len(samples) - 1)]
        assert all(sample.sampled_mask[-1] for sample in samples)
    assert several > 500, "most of these conversations have branches"
    assert deeper > 300, "in many of them a turn goes on from the tokens of an earlier one"


def test_thoughts_that_the_template_leaves_out_begin_anew_and_those_that_it_keeps_go_on() -> None:
    """A call of a tool, its answer, and a further question: the third request has lost the thoughts of the first two turns."""

    async def scenario() -> None:
        recorder = Recorder()
        of = AgentSession(WIDE, recorder, thinking_template, Counter(), "template")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "4+3?"}]
        recorder.next_text = '<think>\nhm\n</think>\n\n<tool_call>{"name": "add", "arguments": {"b": 3, "a": 4}}</tool_call>'
        messages.append(await ask(of, messages, tools=TOOLS))
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "7"})
        recorder.next_text = "<think>\nso\n</think>\n\nseven"
        messages.append(await ask(of, messages, tools=TOOLS))
        messages.append({"role": "user", "content": "sure? <|end|>"})
        recorder.next_text = "yes"
        await ask(of, messages, tools=TOOLS)
        first, second, third = of.tree.turns
        assert [first.parent, second.parent, third.parent] == [None, first, None]
        assert second.told == (SessionMessage("tool", "7", call_id="call_0_0"),)
        harmless = [*messages[:-1], {"role": "user", "content": "sure? < |end|>"}]
        assert recorder.asked[2][0] == written(harmless, TOOLS), "what a user says cannot end its turn"
        last, earlier = samples_of(PROMPT, 3, of.tree, THINKER, thinking_template(()), 1_000_000, Path())
        assert last.prompt_ids == written(harmless, TOOLS)
        assert "hm" not in last.prompt_text
        assert sum(last.sampled_mask) == len("yes") + 1
        assert THINKER.decode(earlier.response_ids).count("</think>") == 2

    asyncio.run(scenario())


def test_without_room_a_history_that_is_written_anew_is_refused_like_any_other() -> None:
    async def scenario() -> None:
        limits = SessionLimits(turns=9, context_tokens=60, response_tokens=60)
        of = AgentSession(limits, Recorder(), thinking_template, Counter(), "template")
        with pytest.raises(RequestError, match="leaves no room for an answer"):
            await ask(of, [{"role": "user", "content": "x" * 60}])
        await ask(of, [{"role": "user", "content": "x"}])
        with pytest.raises(RequestError, match="the last message is the assistant's"):
            await ask(of, [{"role": "assistant", "content": "x"}])

    asyncio.run(scenario())


def test_a_history_under_other_tools_begins_anew() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        of = session(recorder)
        message = await ask(of, [{"role": "user", "content": "hello"}])
        await ask(of, [{"role": "user", "content": "hello"}, message, {"role": "user", "content": "and?"}], tools=TOOLS)
        assert [turn.parent for turn in of.tree.turns] == [None, None]

    asyncio.run(scenario())


def test_a_client_that_went_away_gets_what_was_sampled_for_it() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        of = session(recorder)
        request = openai_form.read_request(body([{"role": "user", "content": "hello"}]))
        [first] = await of.answers(request)  # nobody says that it was delivered
        assert await of.answers(request) == [first]
        first.is_delivered = True
        assert await of.answers(request) != [first]
        assert len(recorder.asked) == 2

    asyncio.run(scenario())


def test_a_client_that_says_that_it_asks_again_gets_what_was_sent_and_may_not_have_come() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        of = session(recorder)
        request = openai_form.read_request(body([{"role": "user", "content": "hello"}], n=2))
        sent = await of.answers(request)
        for turn in sent:
            turn.is_delivered = True
        again = await of.answers(replace(request, is_retry=True))
        assert sorted(turn.number for turn in again) == [0, 1]
        other = openai_form.read_request(body([{"role": "user", "content": "hallo"}]))
        [new] = await of.answers(replace(other, is_retry=True))
        assert new.number == 2, "a first try that never came is a first try"

    asyncio.run(scenario())


def test_a_request_whose_client_went_away_while_it_was_sampled_is_joined_and_others_are_not() -> None:
    async def scenario() -> None:
        released, asked = asyncio.Event(), []

        async def slow(ids: list[int], most: int, media: Any = None, /) -> Generation:
            asked.append(ids)
            await released.wait()
            return Generation([60 + len(asked), END], [-1.0, -1.0], [0, 0], "stop")

        of = session(slow)
        request = openai_form.read_request(body([{"role": "user", "content": "hello"}]))
        gone = asyncio.ensure_future(of.answers(request))
        stays = asyncio.ensure_future(of.answers(request))  # the same question at the same time is another answer
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        again = asyncio.ensure_future(of.answers(request))
        await asyncio.sleep(0)
        released.set()
        turns = await asyncio.gather(stays, again)
        assert len(asked) == 2
        assert turns[0] != turns[1]

    asyncio.run(scenario())


def test_what_is_beyond_the_limits_is_refused_in_a_sentence_and_a_flood_ends_the_episode() -> None:
    async def scenario() -> None:
        of = session(Recorder(), SessionLimits(turns=2, context_tokens=1000, response_tokens=1000))
        messages = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            await ask(of, messages)
        for _ in range(REFUSALS):
            with pytest.raises(RequestError, match=r"the episode's 2 turns are spent \(rollout.episode.max_turns\)"):
                await ask(of, messages)
        assert of.failure.done()
        assert of.is_cut
        assert of.counts["floods"] == 1

    asyncio.run(scenario())


def test_a_context_that_is_full_is_refused_as_openai_does_and_a_shorter_one_is_answered() -> None:
    async def scenario() -> None:
        of = session(Recorder(), SessionLimits(turns=9, context_tokens=120, response_tokens=60))
        with pytest.raises(RequestError, match="leaves no room for an answer") as refused:
            await ask(of, [{"role": "user", "content": "x" * 200}])
        assert refused.value.code == "context_length_exceeded"
        assert of.is_cut
        await ask(of, [{"role": "user", "content": "short"}])
        assert not of.is_cut

    asyncio.run(scenario())


def test_an_engine_that_fails_ends_the_episode_with_its_error() -> None:
    async def scenario() -> None:
        async def fails(ids: list[int], most: int, media: Any = None, /) -> Generation:
            raise EngineError("the engine died")

        of = session(fails)
        with pytest.raises(RequestError, match="the engine failed"):
            await ask(of, [{"role": "user", "content": "hello"}])
        with pytest.raises(EngineError, match="the engine died"):
            of.failure.result()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"n": 0}, "n is 0; it must be a whole number of at least 1"),
        ({"stop": [3]}, "stop must be a string, or a list of at most 16 strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids"),
        ({"stop": ["\ud800"]}, "stop has '\\ud800', which cannot be encoded: its character 0 is half of a surrogate pair"),
        ({"stop": "a\ufffd"}, "stop has 'a\\ufffd', which has the character U+FFFD"),
        ({"top_logprobs": 5}, "top_logprobs must be left out, or 0"),
        ({"response_format": {"type": "json_object"}}, "response_format must be left out"),
        ({"tool_choice": "required"}, "tool_choice is"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'; it must be one of system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "has a picture, but the model takes none"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "files are not taken"),
        ({"tools": [{"name": "add"}]}, "tools must be a list of"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "tool_calls must",
        ),
    ],
)
def test_what_is_not_done_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        openai_form.read_request(body([{"role": "user", "content": "hello"}]) | given)
    assert sentence in str(refused.value)


def test_several_answers_are_branches_of_one_question_and_each_is_delivered_once() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        of = session(recorder)
        request = openai_form.read_request(body([{"role": "user", "content": "hello"}], n=3))
        first = await of.answers(request)
        assert await of.answers(request) == first, "the client went away and asks again"
        answer = await completion(of, [{"role": "user", "content": "hello"}], n=3)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [turn.number for turn in first] == [0, 1, 2]
        assert len(recorder.asked) == 3
        assert answer["usage"]["completion_tokens"] == sum(len(generation.response_ids) for _, generation in recorder.asked)
        await completion(of, [{"role": "user", "content": "hello"}], n=2)
        samples = samples_of(PROMPT, 3, of.tree, TOKENIZER, template(()), 1_000_000, Path())
        assert len(samples) == 5
        narrow = session(recorder, SessionLimits(turns=2, context_tokens=1000, response_tokens=1000))
        with pytest.raises(RequestError, match="n is 3, but the episode may have 2 turns, 0 of which are spent"):
            await completion(narrow, [{"role": "user", "content": "hello"}], n=3)
        assert narrow.is_cut

    asyncio.run(scenario())


def test_log_probs_are_those_of_the_sampled_tokens() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        recorder.next_text = "so é"
        answer = await completion(session(recorder), [{"role": "user", "content": "hello"}], logprobs=True)
        told = answer["choices"][0]["logprobs"]["content"]
        [(_, generation)] = recorder.asked
        assert [one["logprob"] for one in told] == generation.log_probs
        assert [one["token"] for one in told[:3]] == ["s", "o", " "]
        assert told[-1] == {"token": "<|end|>", "bytes": [*b"<|end|>"], "logprob": generation.log_probs[-1], "top_logprobs": []}
        plain = await completion(session(Recorder()), [{"role": "user", "content": "hello"}])
        assert plain["choices"][0]["logprobs"] is None

    asyncio.run(scenario())


class Written:
    """An engine that knows no text, so that what it says is cut; token n has log-prob −n/8 and version n // 5."""

    def __init__(self, text: str) -> None:
        self.ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END]
        self.asked: list[Stops] = []

    async def __call__(
        self, ids: list[int], most: int, media: Sequence[Media] | None = None, /, stops: Stops = NO_STOPS
    ) -> Generation:
        self.asked.append(stops)
        params = stops.added_to(SamplingParams(max_new_tokens=most, stop_token_ids=(END,)))
        ends = (place for place, token in enumerate(self.ids[:most], start=1) if token in params.stop_token_ids)
        length = next(ends, None)
        said, places = self.ids[: length or most], range(length or most)
        routes = np.arange(len(ids) + len(said) - 1, dtype=np.uint8)[:, None, None]
        extra = {"routes": routes, "drafts": DraftCounts(1, 2, 3)}
        reason: Any = "stop" if length is not None else "length"
        whole = Generation(said, [-n / 8 for n in places], [n // 5 for n in places], reason, extra, PrefillCounts(len(ids), 0))
        return ended_at_text(whole, len(ids), params, decode_by(TOKENIZER))


@pytest.mark.parametrize(
    ("text", "stop", "said"),
    [
        ("Thought: add. Observation: 7", ["Observation:"], "Thought: add."),
        ("one. two", ["two", "."], "one"),
        ("aab", "ab", "a"),
        ("Observation:", ["Observation:"], ""),
        ("two at once: 7", ["nce:", "once:"], "two at"),
        ("no stop here", ["Observation:"], "no stop here"),
        ("caf\u00e9 \u00e9", ["\u00e9 "], "caf"),
    ],
)
def test_a_stop_string_ends_a_turn_behind_the_token_that_completes_it(text: str, stop: Any, said: str) -> None:
    async def scenario() -> None:
        sampler = Written(text)
        of = session(sampler)
        answer = await completion(of, [{"role": "user", "content": "hello"}], stop=stop)
        assert answer["choices"][0]["message"]["content"] == (said or None)
        assert answer["choices"][0]["finish_reason"] == "stop"
        [turn] = of.tree.turns
        stops = [stop] if isinstance(stop, str) else stop
        assert sampler.asked == [Stops(tuple(stops))]
        ends = min((text.index(one) + len(one) for one in stops if one in text), default=None)
        kept = len(text[:ends].encode()) if ends is not None else len(sampler.ids)
        generation = turn.generation
        assert generation.response_ids == sampler.ids[:kept]
        assert generation.log_probs == [-n / 8 for n in range(kept)]
        assert generation.weight_versions == [n // 5 for n in range(kept)]
        if "routing_replay" not in OPTIONS:
            return
        routes = generation.extra["routes"]
        assert len(routes) == len(turn.told_ids) + kept - 1
        known = routes[:, 0, 0] != 255
        of_one_version = (len(sampler.ids) - 1) // 5 == (kept - 1) // 5
        assert known.all() if of_one_version else not known.any(), "those of a pass under other weights are gone"

    asyncio.run(scenario())


def test_stop_tokens_and_limits_end_a_turn_that_has_stops_and_its_history_goes_on() -> None:
    async def scenario() -> None:
        x = ids_of("x")[0]
        of = session(Written("say x and y"))
        answer = await completion(of, [{"role": "user", "content": "hello"}], stop_token_ids=[x])
        assert answer["choices"][0]["message"]["content"] == "say"
        told = anthropic_form.answer(of.tree.turns[0], "megarl")
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", x)
        assert of.tree.turns[0].generation.response_ids == ids_of("say x")
        [first] = of.tree.turns
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "say"}, {"role": "user", "content": "?"}]
        request = openai_form.read_request(body(said))
        assert of.tree.attach(request.messages, request.tools_key) == (first, 2)
        cut = session(Written("say x and y"))
        answer = await completion(cut, [{"role": "user", "content": "hello"}], stop="and", max_completion_tokens=5)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 5

    asyncio.run(scenario())


def test_of_turns_that_were_told_and_said_the_same_the_last_is_gone_on_from_and_of_a_path_the_deepest() -> None:
    tree, told = TurnTree(), [SessionMessage("user", "hi")]
    said, again = SessionMessage("assistant", "yes"), SessionMessage("user", "and?")
    first, last = (tree.add(None, "[]", told, [1, 2], Generation([3], [-1.0], [0], "stop"), said) for _ in range(2))
    deepest = tree.add(last, "[]", [again], [4], Generation([5], [-1.0], [0], "stop"), said)
    assert tree.attach([*told, said, SessionMessage("user", "?")], "[]") == (last, 2)
    assert tree.attach([*told, said, again, said, again], "[]") == (deepest, 4)
    assert tree.attach_ids([1, 2, 3, 9]) is last
    assert tree.attach_ids([1, 2, 3, 4, 5, 6]) is deepest
    assert tree.attach_ids([1, 2]) is None
    assert first.children == []


def test_what_follows_the_beginning_of_a_context_is_bounded_in_all() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        recorder.next_text = "ten tokens"
        of = session(recorder, SessionLimits(turns=9, context_tokens=1000, response_tokens=30))
        opening = [{"role": "user", "content": "hello"}]
        said = await ask(of, opening)
        [turn] = of.tree.turns
        with pytest.raises(RequestError, match="at most 30 of these may follow its beginning") as refused:
            await ask(of, [*opening, said, {"role": "user", "content": "more"}])
        assert refused.value.code == "context_length_exceeded"
        between = len(
            template(()).between([SessionMessage("user", "more").for_template()], turn.generation.response_ids[-1]).ids
        )
        assert 30 - len(turn.generation.response_ids) - between < 1 <= 30 - between, "each part alone would have fitted"

    asyncio.run(scenario())


def test_both_protocols_say_the_same() -> None:
    """A conversation in Anthropic's form, and the same in OpenAI's, are one request."""
    ours = openai_form.read_request(
        body(
            [
                {"role": "system", "content": "be short"},
                {"role": "user", "content": [{"type": "text", "text": "add"}, {"type": "text", "text": " 3"}]},
                {
                    "role": "assistant",
                    "content": "well",
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "4"},
                {"role": "user", "content": "and?"},
            ],
            tools=[{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}],
            max_tokens=9,
            temperature=0.1,
        )
    )
    theirs = anthropic_form.read_request(
        {
            "model": "megarl",
            "max_tokens": 9,
            "temperature": 0.1,
            "system": [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "add 3"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "well"},
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 3}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]},
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
            "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
        }
    )
    assert ours == theirs
