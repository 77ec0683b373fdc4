"""Options of the chat template that an agent's request has: what the policy sees is what transformers writes with them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import Any

import pytest

from megarl.data import left_out
from megarl.data.left_out import LeftOut
from megarl.options.agents import anthropic_form, openai_form, responses_form
from megarl.options.agents.messages import ChatRequest, RequestError
from megarl.options.agents.session import AgentSession
from megarl.rollout.episodes.turns import TurnTemplate
from tests.data.chat_tokenizers import CHATML, byte_tokenizer
from tests.options.agents.test_sessions import WIDE, Recorder

TEMPLATE = (
    "{%- if style is defined %}<|start|>system\n{{ style }}<|end|>\n{%- endif %}"
    "{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{%- endif %}{%- endif %}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
ASKED = [{"role": "user", "content": "hi"}]


def openai(args: Any) -> ChatRequest:
    return openai_form.read_request({"model": "megarl", "messages": ASKED, "chat_template_kwargs": args})


def anthropic(args: Any) -> ChatRequest:
    return anthropic_form.read_request({"model": "megarl", "messages": ASKED, "chat_template_kwargs": args})


def responses(args: Any) -> ChatRequest:
    return responses_form.read_request({"model": "megarl", "input": "hi", "chat_template_kwargs": args}, {}).chat


def written(messages: list[dict[str, Any]], **args: Any) -> list[int]:
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **args)
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def template(tools: Any) -> TurnTemplate:
    return TurnTemplate(TOKENIZER, [], "user", template_args={"style": "the run's"})


@pytest.mark.parametrize("form", [openai, anthropic, responses])
def test_a_request_s_options_go_before_the_row_s_and_these_before_the_run_s(form: Any) -> None:
    async def asked(row: dict[str, Any], request: Any) -> list[int]:
        recorder = Recorder()
        await AgentSession(WIDE, recorder, template, Counter(), template_args=row).answers(form(request))
        return recorder.asked[0][0]

    off = {"enable_thinking": False}
    assert asyncio.run(asked({}, None)) == written(ASKED, style="the run's")
    assert asyncio.run(asked(off, None)) == written(ASKED, style="the run's", **off)
    assert asyncio.run(asked({"style": "the row's"}, off)) == written(ASKED, style="the row's", **off)
    assert asyncio.run(asked({"style": "the row's", **off}, {"style": "mine"})) == written(ASKED, style="mine", **off)


def test_a_conversation_goes_on_under_equal_options_and_begins_anew_under_others() -> None:
    async def talk() -> None:
        recorder = Recorder()
        session = AgentSession(WIDE, recorder, template, Counter())
        recorder.next_text = "hello"
        body = {"model": "megarl", "messages": ASKED, "chat_template_kwargs": {"enable_thinking": False}}
        await session.answers(openai_form.read_request(body))
        history = [*ASKED, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "on"}]
        await session.answers(openai_form.read_request({**body, "messages": history}))
        first, second = (asked for asked, _ in recorder.asked)
        assert second[: len(first)] == first
        assert len(session.tree.branches()) == 1
        await session.answers(openai_form.read_request({**body, "messages": history, "chat_template_kwargs": {}}))
        assert recorder.asked[2][0] == written(history, style="the run's")
        assert len(session.tree.branches()) == 2

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"enable_thinkin": False}, " has 'enable_thinkin' (did you mean 'enable_thinking'?), which the chat template never "
         "reads; it reads enable_thinking, style"),
        ({"enable_thinking": "false"}, ".enable_thinking is the text 'false'; it must be false without quotes"),
        ([1], " must be an object of options of the chat template"),
    ],
)  # fmt: skip
def test_a_request_with_an_option_of_no_use_is_refused(args: Any, sentence: str) -> None:
    async def ask() -> None:
        await AgentSession(WIDE, Recorder(), template, Counter()).answers(openai(args))

    with pytest.raises(RequestError) as raised:
        asyncio.run(ask())
    assert (str(raised.value), raised.value.status) == (f"chat_template_kwargs{sentence}", 400)


def test_what_a_template_leaves_out_of_requests_is_a_warning_told_once(caplog) -> None:
    tokenizer = byte_tokenizer(CHATML)
    looker = LeftOut(tokenizer, refuses=False)

    def quiet(tools: Any) -> TurnTemplate:
        made = TurnTemplate(tokenizer, [], "user")
        made.left_out = looker
        return made

    async def ask() -> None:
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}
        told = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, *ASKED]
        for number in range(3):
            messages = [{"role": "user", "content": f"{number}"}, *told]
            recorder = Recorder()
            await AgentSession(WIDE, recorder, quiet, Counter()).answers(
                openai_form.read_request({"model": "megarl", "messages": messages})
            )
            assert recorder.asked, "the run goes on"

    asyncio.run(ask())
    records = [record for record in caplog.records if record.name == left_out.__name__]
    assert [(record.args[0], record.levelno) for record in records] == [("tool_calls", logging.WARNING)]  # type: ignore[index]
    assert "of message 2 (counted from 0) of a request, the assistant's" in records[0].getMessage()
