"""Nothing of a message is dropped unseen: what a template leaves out is an error, a warning, or a matter of history."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data import chat_rendering, left_out
from megarl.data.left_out import FIRST_ROWS, LeftOut
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import PromptBuilder
from megarl.errors import DataError
from tests.data.chat_tokenizers import byte_tokenizer
from tests.data.family_templates import LLAMA3, QWEN3
from tests.data.published_templates import LLAMA_31, PICTURES_ONLY, PUBLISHED, QWEN2_5, SMOLLM2

USER = {"role": "user", "content": "What is 2 + 2?"}
CALL = {"type": "function", "id": "call_0", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "4"}
SAYS = {"role": "assistant", "content": "It is 4."}
THINKS = {**SAYS, "reasoning_content": "Two and two."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def sft(template: str, row: dict[str, Any], **settings: Any) -> Any:
    (sample,) = SupervisedBuilder(byte_tokenizer(template), "sft", SupervisedSettings(**settings)).build([row], prefix="train")
    return sample


def refusal(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    with pytest.raises(DataError) as raised:
        sft(template, {"messages": messages, **more})
    return str(raised.value)


@pytest.mark.parametrize("template", [SMOLLM2, LLAMA3])
def test_tool_calls_that_a_template_does_not_know_are_an_error(template: str) -> None:
    assert refusal(template, [USER, CALLS, ANSWER, SAYS]) == (
        "the chat template leaves out 'tool_calls' of message 1 (counted from 0) of data.train row 0 (counted from 0), the "
        "assistant's and trained on; use a template that writes it, or accept the loss by data.ignore_fields: [tool_calls]"
    )
    sample = sft(template, {"messages": [USER, CALLS, ANSWER, SAYS]}, ignore_fields=("tool_calls",))
    assert "add" not in sample.response_text


@pytest.mark.parametrize("template", [QWEN2_5, LLAMA_31])
def test_templates_that_write_tool_calls_are_taken(template: str) -> None:
    sample = sft(template, {"messages": [USER, CALLS, ANSWER, SAYS], "tools": [TOOL]})
    assert '{"a": 2, "b": 2}' in sample.response_text


def test_tools_that_a_template_does_not_know_are_an_error() -> None:
    sentence = refusal(SMOLLM2, [USER, SAYS], tools=[TOOL])
    assert sentence.startswith("the chat template leaves out 'tools' of data.train row 0 (counted from 0); ")
    assert sft(SMOLLM2, {"messages": [USER, SAYS], "tools": [TOOL]}, ignore_fields=("tools",)).response_text


def test_text_beside_a_tool_call_that_a_template_drops_is_an_error() -> None:
    said = {**CALLS, "content": "Let me add."}
    sentence = refusal(LLAMA_31, [USER, said, ANSWER, SAYS], tools=[TOOL])
    assert "leaves out 'content' of message 1 (counted from 0)" in sentence
    assert "Let me add." in sft(QWEN2_5, {"messages": [USER, said, ANSWER, SAYS]}).response_text


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_a_trained_turn_are_an_error(key: str) -> None:
    thinks = {**SAYS, key: "Two and two."}
    assert "Two and two." in sft(QWEN3, {"messages": [USER, thinks]}).response_text, "under the name that the template reads"
    for template in (SMOLLM2, QWEN2_5):
        assert f"leaves out '{key}' of message 1 (counted from 0)" in refusal(template, [USER, thinks])
        assert "trained on" in refusal(template, [USER, thinks])


def test_thoughts_that_a_template_keeps_in_the_last_turn_are_a_matter_of_history(caplog) -> None:
    assert "Two and two." in sft(QWEN3, {"messages": [USER, THINKS]}).response_text
    for template, expected in ((QWEN3, []), (SMOLLM2, ["reasoning_content"])):
        caplog.clear()
        data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"), prompt_key="prompt")
        PromptBuilder(byte_tokenizer(template), data).build([{"prompt": [USER, THINKS, USER]}] * 3, prefix="train")
        told = [record.args[0] for record in caplog.records if record.name == left_out.__name__]  # type: ignore[index]
        assert told == expected, "once, and of the template that knows no thoughts"


def test_names_and_ids_are_a_warning_told_once(caplog) -> None:
    rows = [{"messages": [{**USER, "name": "Ann", "score": 2}, {**SAYS, "id": 7}]}] * 3
    for ignored, expected in (((), ["name", "score", "id"]), (("score", "id"), ["name"])):
        caplog.clear()
        settings = SupervisedSettings(ignore_fields=ignored)
        SupervisedBuilder(byte_tokenizer(SMOLLM2), "sft", settings).build(rows, prefix="train")
        records = [record for record in caplog.records if record.name == left_out.__name__]
        assert [record.args[0] for record in records] == expected  # type: ignore[index]
        assert all(record.levelno == logging.WARNING for record in records)
    assert records[0].getMessage() == (
        "warning: the chat template leaves out 'name' of message 0 (counted from 0) of data.train row 0 (counted from 0), the "
        "user's, and perhaps of others; data.ignore_fields: [name] accepts it"
    )


def test_null_keys_as_parquet_has_them_are_no_keys() -> None:
    nulls = {"tool_calls": None, "reasoning_content": None, "name": None}
    for template in (SMOLLM2, LLAMA_31, QWEN3):
        plain = sft(template, {"messages": [USER, SAYS]})
        filled = sft(template, {"messages": [{**USER, **nulls}, {**SAYS, **nulls}]})
        assert (filled.prompt_ids, filled.response_ids) == (plain.prompt_ids, plain.response_ids)


PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]


@pytest.mark.parametrize("family", PUBLISHED)
def test_parts_of_text_are_joined_where_a_template_takes_text_only(family: str) -> None:
    template = PUBLISHED[family]
    joined = sft(template, {"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}]})
    plain = sft(template, {"messages": [USER, {"role": "assistant", "content": "What is 2 + 2?"}]})
    assert (joined.prompt_ids, joined.response_ids) == (plain.prompt_ids, plain.response_ids)
    data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"), prompt_key="prompt")
    (prompt,) = PromptBuilder(byte_tokenizer(template), data).build([{"prompt": [{**USER, "content": PARTS}]}], prefix="train")
    expected = byte_tokenizer(template).apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    assert prompt.prompt_text == expected


def test_text_is_a_part_where_a_template_takes_parts_only() -> None:
    sample = sft(PICTURES_ONLY, {"messages": [USER, SAYS]})
    as_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in (USER, SAYS)]
    expected = byte_tokenizer(PICTURES_ONLY).apply_chat_template(as_parts, tokenize=False)
    assert (sample.prompt_text + sample.response_text).strip() == expected.strip()
    assert "It is 4." in sample.response_text


def test_a_part_that_is_no_text_is_an_error_where_a_template_takes_text_only() -> None:
    asked = {"role": "user", "content": [*PARTS, {"type": "file", "file": "a.pdf"}]}
    assert refusal(QWEN3, [asked, SAYS]) == (
        "message 0 (counted from 0) of data.train row 0 (counted from 0) has a part of type 'file' in its content, but the "
        "chat template takes text alone; leave it out, or accept the loss by data.ignore_fields: [content]"
    )
    assert "2 + 2?" in sft(QWEN3, {"messages": [asked, SAYS]}, ignore_fields=("content",)).prompt_text


WITHOUT = "{% for m in messages if m.role != 'ROLE' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_a_message_that_a_template_leaves_out_whole_is_an_error() -> None:
    system = {"role": "system", "content": "Be brief."}
    no_system, no_user = (WITHOUT.replace("ROLE", role) for role in ("system", "user"))
    assert "leaves out 'content' of message 0 (counted from 0)" in refusal(no_system, [system, USER, SAYS])
    with pytest.raises(DataError, match=r"leaves out 'content' of data\.system_prompt, before data\.train row 0"):
        sft(no_system, {"messages": [USER, SAYS]}, system_prompt="Be brief.")
    with pytest.raises(DataError, match=r"leaves out 'content' of message 0 \(counted from 0\)"):
        sft(no_user, {"messages": [USER, SAYS]}, system_prompt="Be brief.")


def test_preferences_and_reward_models_are_looked_at_alike() -> None:
    row = {"chosen": [USER, SAYS], "rejected": [USER, CALLS]}
    with pytest.raises(DataError, match="leaves out 'tool_calls' of message 1"):
        SupervisedBuilder(byte_tokenizer(SMOLLM2), "pairs", SupervisedSettings()).build([row], prefix="train")


def test_later_rows_are_rendered_only_where_a_set_of_keys_is_new(monkeypatch) -> None:
    rendered = []
    real = left_out.render
    monkeypatch.setattr(left_out, "render", lambda *given, **named: rendered.append(1) or real(*given, **named))
    looker = LeftOut(byte_tokenizer(SMOLLM2))
    counts = []
    for number in range(FIRST_ROWS + 10):
        before = len(rendered)
        looker.check([USER, SAYS], f"row {number}", trained=[1])
        counts.append(len(rendered) - before)
    assert counts == [1] * FIRST_ROWS + [0] * 10
    with pytest.raises(DataError, match="'tool_calls' of message 1"):
        looker.check([USER, CALLS], "row 300", trained=[1])


def test_without_refusals_every_loss_is_a_warning_told_once(caplog) -> None:
    looker = LeftOut(byte_tokenizer(SMOLLM2), refuses=False)
    for _ in range(3):
        looker.check([USER, CALLS, USER], "a request", tools=[TOOL])
    told = [record.args[0] for record in caplog.records if record.name == left_out.__name__]  # type: ignore[index]
    assert told == ["tools", "tool_calls"]


def test_a_template_that_never_ends_is_waited_for_once_and_then_refused_in_a_sentence(monkeypatch) -> None:
    monkeypatch.setattr(chat_rendering, "LONGEST_S", 0.2)
    bounds: list[float] = []
    bounded = chat_rendering.bounded
    monkeypatch.setattr(chat_rendering, "bounded", lambda work, **limits: bounds.append(1) or bounded(work, **limits))
    loop = "{% for n in range(99999) %}"
    endless = f"{loop * 3}x{'{% endfor %}' * 3}"
    builder = SupervisedBuilder(byte_tokenizer(endless), "sft", SupervisedSettings())
    messages = [{"role": "user", "content": "q", "name": "me"}, {"role": "assistant", "content": "a", "weight": 1, "more": "b"}]
    with pytest.raises(DataError, match=r"does not fit the tokenizer's chat template: it took more than"):
        builder.build([{"messages": messages}], prefix="train")
    assert len(bounds) == 2
