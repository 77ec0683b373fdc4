"""OpenAI's Responses API and the rarer parts of its chat completions, as the public `openai` package asks for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from megarl.data.sample import Sample
from megarl.data.stop_finder import decode_by
from megarl.options.agents.agents import AgentEnd
from megarl.options.agents.messages import RequestError, SaidCall, SessionMessage
from megarl.options.agents.responses_form import read_request
from megarl.options.agents.section import AgentConfig
from megarl.rollout.engines.protocol import Generation, SamplingParams
from megarl.rollout.engines.stops import NO_STOPS, Stops, ended_at_text
from tests.options.agents.test_agents import END, HERE, PROMPT, TOKENIZER, opened

CALL = '<tool_call>{"name": "add", "arguments": {"b": 3, "a": 4}}</tool_call>'
ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


class Says:
    """A sampler that says one text after the other, and remembers what it was asked behind."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = [*texts], list[str]()

    async def __call__(self, ids: list[int], most: int, media: Any = None, /, stops: Stops = NO_STOPS) -> Generation:
        self.asked.append(TOKENIZER.decode(ids))
        said = [*TOKENIZER(self.texts.pop(0), add_special_tokens=False)["input_ids"], END]
        reason: Any = "stop" if len(said) <= most else "length"
        whole = Generation(said[:most], [-0.5] * len(said[:most]), [3] * len(said[:most]), reason)
        return ended_at_text(whole, len(ids), SamplingParams(max_new_tokens=most, stop=stops.texts), decode_by(TOKENIZER))


def acted(sampler: Says, act: Callable[[openai.AsyncOpenAI], Awaitable[None]], **settings: Any) -> list[Sample]:
    """The branches of an episode in which `act` asks the endpoint with the public client."""
    episodes = opened(AgentConfig(function=f"{HERE}:two_turns", processes=1), **settings)
    agents = episodes.context.shared
    assert agents is not None

    class Client:
        name = "a client"

        async def get_ready(self) -> None: ...

        async def run(self, task: Any) -> AgentEnd:
            async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
                await act(client)
            return AgentEnd()

        def close(self) -> None: ...

    agents._agent = Client()
    try:
        return asyncio.run(episodes.branches(PROMPT, 0, sampler))  # type: ignore[arg-type]
    finally:
        episodes.close()


def test_a_conversation_that_the_endpoint_keeps_is_one_sample() -> None:
    """A call of a tool, its answer by `previous_response_id`, and a last question with all items sent again."""

    async def act(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="megarl", instructions="be short", input="4+3?", tools=[ADD])
        assert first.status == "completed"
        thought, call = first.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "hm")  # type: ignore[union-attr,index]
        assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"b": 3, "a": 4}')  # type: ignore[union-attr]
        assert first.usage is not None
        assert first.usage.output_tokens == len(f"<think>hm</think>{CALL}") + 1
        told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}  # type: ignore[union-attr]
        second = await client.responses.create(
            model="megarl", instructions="be short", previous_response_id=first.id, input=[told], tools=[ADD]
        )
        assert second.output_text == "seven"
        everything: Any = [{"role": "user", "content": "4+3?"}, *first.output, told, *second.output]
        asked = [*everything, {"role": "user", "content": [{"type": "input_text", "text": "sure?"}]}]
        third = await client.responses.create(
            model="megarl", instructions="be short", input=asked, tools=[ADD], max_output_tokens=2
        )
        assert (third.status, third.output_text) == ("incomplete", "ye")
        assert third.incomplete_details is not None
        assert third.incomplete_details.reason == "max_output_tokens"

    sampler = Says(f"<think>hm</think>{CALL}", "seven", "yes")
    [sample] = acted(sampler, act)
    assert len(sampler.asked) == 3
    assert sampler.asked[1].startswith(sampler.asked[0] + f"<think>hm</think>{CALL}<|end|>")
    assert sampler.asked[2].startswith(sampler.asked[1] + "seven<|end|>")
    assert sum(sample.sampled_mask) == len(f"<think>hm</think>{CALL}sevenye") + 2


def test_a_streamed_response_is_the_whole_one() -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        async with client.responses.stream(model="megarl", input="4+3?", tools=[ADD]) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert "response.reasoning_text.delta" in kinds
        assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call"]
        assert streamed.output_text == "well"
        assert streamed.output[2].arguments == '{"b": 3, "a": 4}'  # type: ignore[union-attr]
        texts = []
        plain = await client.responses.create(model="megarl", input="and?", previous_response_id=streamed.id, stream=True)
        async for event in plain:
            texts += [event.delta] if event.type == "response.output_text.delta" else []
        assert texts == ["seven"]

    branches = acted(Says(f"<think>hm</think>well{CALL}", "seven"), act)
    assert len(branches) == 2, "the second request offers no tools"


def test_chat_completions_with_stops_several_answers_log_probs_and_models() -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        ask: Any = {"model": "megarl", "messages": [{"role": "user", "content": "hello"}]}
        several = await client.chat.completions.create(**ask, n=2, stop=["!"], logprobs=True)
        assert [choice.message.content for choice in several.choices] == ["hi", "yes"]
        assert several.choices[0].logprobs is not None
        assert [(one.token, one.logprob) for one in several.choices[0].logprobs.content or []] == [
            ("h", -0.5), ("i", -0.5), ("!", -0.5),
        ]  # fmt: skip
        texts: dict[int, str] = {}
        async for chunk in await client.chat.completions.create(
            **ask, n=2, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        assert texts == {0: "a", 1: "b"}
        assert chunk.usage is not None
        assert chunk.usage.completion_tokens == 4
        assert (await client.models.retrieve("megarl")).id == "megarl"
        with pytest.raises(openai.NotFoundError, match="model is 'gpt-4o', which is not served here"):
            await client.models.retrieve("gpt-4o")
        schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
        with pytest.raises(openai.BadRequestError, match="response_format must be left out"):
            await client.chat.completions.create(**ask, response_format=schema)

    branches = acted(Says("hi! there", "yes! and", "a", "b"), act)
    assert len(branches) == 4
    assert sum(sum(sample.sampled_mask) for sample in branches) == len("hi!") + len("yes!") + 2 * len("aE")


def test_a_stream_that_breaks_off_is_sent_again_as_it_was() -> None:
    """The public package asks again, and says so, when a connection breaks: by then all of the stream may have been sent."""

    async def act(client: openai.AsyncOpenAI) -> None:
        ask: Any = {"model": "megarl", "messages": [{"role": "user", "content": "hello"}]}
        body = json.dumps({**ask, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"data: ")
        writer.transport.abort()  # type: ignore[attr-defined]
        again = await client.chat.completions.create(**ask, extra_headers={"x-stainless-retry-count": "1"})
        assert again.choices[0].message.content == "hi"

    sampler = Says("hi", "another")
    [sample] = acted(sampler, act)
    assert len(sampler.asked) == 1
    assert sum(sample.sampled_mask) == len("hi") + 1


def test_without_the_key_of_an_open_episode_nothing_is_answered() -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        stranger = client.with_options(api_key="of another episode")
        with pytest.raises(openai.AuthenticationError, match="this key belongs to no episode that is open"):
            await stranger.responses.create(model="megarl", input="hello")
        await client.responses.create(model="megarl", input="hello")

    [sample] = acted(Says("hi"), act)
    assert sample.response_text == "hi"


def test_two_agents_with_one_key_are_branches_of_one_episode() -> None:
    """Helpers share the key of the agent that started them; whoever asks at the same time gets an answer of its own."""

    async def act(client: openai.AsyncOpenAI) -> None:
        async def one(number: int) -> str:
            conversation: list[Any] = [{"role": "user", "content": f"I am {number}"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="megarl", messages=conversation)
                said = answer.choices[0].message
                conversation += [said.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
            return str(said.content)

        assert sorted(await asyncio.gather(one(1), one(2))) == ["c", "d"]

    branches = acted(Says("a", "b", "c", "d"), act)
    assert len(branches) == 2
    assert [sum(sample.sampled_mask) for sample in branches] == [4, 4]
    assert {turn["content"] for sample in branches for turn in sample.turns if turn["role"] == "assistant"} == {*"abcd"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"input": []}, "input must be text, or a list with at least one item"),
        ({"previous_response_id": "resp_9"}, "previous_response_id is 'resp_9', which is no response of this episode"),
        ({"tools": [{"type": "web_search"}]}, "tools has one of type 'web_search'; it must be 'function'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type is 'item_reference'; it must be one of message"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role is 'robot'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "input[0] must have a name, and the JSON text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "has a picture, but the model takes none"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format must be left out"),
        ({"background": True}, "background is true; it must be left out"),
        ({"tool_choice": "required"}, 'tool_choice is "required"; it must be left out'),
        ({"max_output_tokens": 0}, "max_output_tokens is 0; it must be a whole number of at least 1"),
    ],
)
def test_what_is_not_done_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_request({"model": "megarl", "input": "hello", **given}, {})
    assert sentence in str(refused.value)


def test_instructions_are_of_one_request_and_items_of_one_assistant_are_one_message() -> None:
    before = (SessionMessage("user", "a"), SessionMessage("assistant", "b"))
    given = read_request(
        {
            "instructions": "new",
            "previous_response_id": "resp_0",
            "input": [
                {"role": "user", "content": "c"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
                {"type": "function_call_output", "call_id": "1", "output": "e"},
            ],
        },
        {"resp_0": before},
    )
    calls = (SaidCall("f", "{}", "1"), SaidCall("g", "{}", "2"))
    said = SessionMessage("assistant", "d", calls, "hm")
    new = (SessionMessage("user", "c"), said, SessionMessage("tool", "e", call_id="1"))
    assert given.conversation == (*before, *new)
    assert given.chat.messages == (SessionMessage("system", "new"), *before, *new)
