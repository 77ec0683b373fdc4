"""Prompts made of columns, system messages of rows, and messages in older forms: right where they fit, a sentence elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.row_template import with_prompt_key
from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.inspect import inspect
from megarl.data.prompts import load_rows
from megarl.data.row_template import fill
from megarl.data.rows import find_value, value_of
from megarl.data.sample import Prompt
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import PromptBuilder
from megarl.errors import ConfigError, DataError
from tests.config import smallest
from tests.data.chat_tokenizers import CHATML, byte_tokenizer

CHAT, PLAIN = byte_tokenizer(), byte_tokenizer(None)
ROW: dict[str, Any] = {
    "q": "Which?", "n": 3, "f": 0.5, "none": None, "empty": "", "nested": {"b": [{"c": "deep"}]}, "list": ["x", "y"],
    "ids": [7, 8], "arc": {"text": ["x", "y"], "label": ["1", "2"]}, "Long Name": "long", "braces": "{q}",
}  # fmt: skip


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prompt_of(row: dict[str, Any], tokenizer: Any = CHAT, **fields: Any) -> Prompt:
    data = DataConfig(train=SourceConfig(path="rows.jsonl"), **fields)
    (prompt,) = PromptBuilder(tokenizer, data).build([row], prefix="train")
    return prompt


def imitated(row: dict[str, Any], tokenizer: Any = CHAT, **fields: Any) -> str:
    """The text of a row's sample."""
    (sample,) = SupervisedBuilder(tokenizer, "sft", SupervisedSettings(**fields)).build([row], prefix="train")
    return sample.prompt_text + sample.response_text


def chatml(*messages: dict[str, str], ask: bool = False) -> str:
    return str(CHAT.apply_chat_template(list(messages), add_generation_prompt=ask, tokenize=False))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{q}", "Which?"),
        ("{q} {n} {f}", "Which? 3 0.5"),
        ("{q}\n{empty}", "Which?"),
        ("{q}\n{none}", "Which?"),
        ("{none}{q}\n\n{empty} \n", "Which?"),
        ("{nested.b.0.c}: {Long Name}", "deep: long"),
        ("{{q}} {q} {{", "{q} Which? {"),
        ("{braces}", "{q}"),  # what a row says is no template
        ("{list:letters}", "A. x\nB. y"),
        ("{arc:letters}", "A. x\nB. y"),
        ("{ids:list} of {list:list}", "7, 8 of x, y"),
    ],
)
def test_a_template_makes_one_text_of_columns(template: str, text: str) -> None:
    assert fill(template, ROW, "data.prompt", "row 0") == text


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{quest}", "row 0 has no key 'quest' (data.prompt); it has q, n"),
        ("{nested.b.4.c}", "'nested.b' of row 0 has 1 items, but 'nested.b.4.c' (data.prompt) names item 4, counted from 0"),
        ("{list}", "row 0 has a list under 'list' (data.prompt); it must be a text or a number; a list is written as "
         "{list:letters} or {list:list}"),
        ("{nested:list}",
         "row 0 has [[{'c': 'deep'}]] under 'nested' (data.prompt); with :list it must be a list of texts or numbers"),
        ("{q:letters}", "row 0 has 'Which?' under 'q' (data.prompt); with :letters it must be a list of texts or numbers"),
        ("say {empty}{none}", "row 0 has nothing in the columns that data.prompt names; one of them must have a text"),
        ("{many:letters}", "row 0 has 27 items under 'many' (data.prompt); there are letters for 26"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_a_template_is_named(template: str, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        fill(template, {**ROW, "many": [*range(27)]}, "data.prompt", "row 0")
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{q", "'{q' has a brace without its partner; a brace of the text itself must be written twice, {{ or }}"),
        ("q}", "'q}' has a brace without its partner; a brace of the text itself must be written twice, {{ or }}"),
        ("{}",
         "'{}' has {}, which names no column of a row; it must be {name of a column}, and a brace of the text itself must be "
         "written twice"),
        ("{0}", "'{0}' has {0}, which names no column of a row"),
        ("{q!r}", "'{q!r}' has {q!r}, which names no column of a row"),
        ("{q:>8}", "'{q:>8}' has {q:>8}; what follows a column's name must be :letters or :list"),
        ("q", "'q' names no column; it must have one in braces, such as {question}"),
    ],
)  # fmt: skip
def test_a_template_that_is_none_is_refused_with_its_field(template: str, sentence: str) -> None:
    for parsed, data in ((smallest.config, smallest.RL["data"]), (smallest.supervised, smallest.SUPERVISED["data"])):
        with pytest.raises(ConfigError) as error:
            parsed(data=data | {"prompt": template})
        assert str(error.value).startswith(f"data.prompt: {sentence}")
    if "{" in template or "}" in template:
        with pytest.raises(ConfigError) as error:
            smallest.config(data={"train": {"path": "a.jsonl", "columns": {"x": template}}})
        assert str(error.value).startswith(f"data.train.columns: {sentence}")


def test_a_prompt_of_columns_stands_under_a_key_of_its_own() -> None:
    """So rewards see it beside the columns, and rows that a run writes are read by the same YAML again."""
    data = smallest.config(data=smallest.RL["data"] | {"prompt": "Solve: {question}"}).data
    assert (data.prompt, data.prompt_key) == ("Solve: {question}", "prompt")
    assert smallest.supervised(data=smallest.SUPERVISED["data"] | {"prompt": "Q: {prompt}"}).data.prompt_key == "question"
    assert with_prompt_key({"prompt": "{a}", "prompt_key": "b"}) == {"prompt": "{a}", "prompt_key": "b"}
    with pytest.raises(
        ConfigError, match=r"^data: prompt_key is 'question', a column that prompt is made of; it must be another"
    ):
        smallest.config(data=smallest.RL["data"] | {"prompt": "Solve: {question}", "prompt_key": "question"})
    evaluation = {"name": "held", "rows": {"path": "a.csv"}, "prompt": "{prompt}?"}
    assert smallest.config(evaluations=[evaluation]).evaluations[0].prompt_key == "question"


@pytest.mark.parametrize("tokenizer", [CHAT, PLAIN])
def test_rows_have_the_prompt_that_columns_make(tokenizer: Any) -> None:
    row = {"instruction": "Add.", "input": "1+1", "output": "2"}
    prompt = prompt_of(row, tokenizer, prompt="{instruction}\n{input}")
    assert prompt.prompt_text == (chatml(say("user", "Add.\n1+1"), ask=True) if tokenizer is CHAT else "Add.\n1+1")
    assert prompt.row == {**row, "prompt": "Add.\n1+1"}
    text = imitated(row, tokenizer, prompt="{instruction}\n{input}", response_key="output")
    assert text == (chatml(say("user", "Add.\n1+1"), say("assistant", "2"))[:-1] if tokenizer is CHAT else "Add.\n1+12")


def test_columns_may_be_made_of_others(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("thought,answer\nHm,4\n")
    source = SourceConfig(
        path=str(tmp_path / "rows.csv"), columns={"response": "<think>{thought}</think>{answer}", "gold": "answer"}
    )
    assert load_rows(source) == [{"thought": "Hm", "answer": "4", "response": "<think>Hm</think>4", "gold": "4"}]
    with pytest.raises(
        DataError, match=r"^'.*rows\.csv' line 2 has no key 'thougt' \(columns\.x\) \(did you mean 'thought'\?\)"
    ):
        load_rows(SourceConfig(path=str(tmp_path / "rows.csv"), columns={"x": "{thougt}"}))


def test_a_dotted_key_may_count_items() -> None:
    row = {"a": [{"b": 1}, {"b": 2}]}
    assert (value_of(row, "a.1.b", "f", "row"), find_value(row, "a.1.b"), find_value(row, "a.2.b")) == (2, 2, None)


@pytest.mark.parametrize("system", ["Be brief.", "", None])
def test_a_row_may_bring_a_system_message(system: str | None) -> None:
    first = [say("system", "Be brief.")] if system else []
    row = {"system": system, "question": "q", "prompt": "q", "response": "r"}
    assert prompt_of(row).prompt_text == chatml(*first, say("user", "q"), ask=True)
    assert prompt_of({**row, "question": [say("user", "q")]}).prompt_text == chatml(*first, say("user", "q"), ask=True)
    assert prompt_of(row, PLAIN).prompt_text == ("Be brief.\n\nq" if system else "q")
    assert prompt_of(row, system_key=None).prompt_text == chatml(say("user", "q"), ask=True)
    assert imitated(row) == chatml(*first, say("user", "q"), say("assistant", "r"))[:-1]
    talk = {"system": system, "messages": [say("user", "q"), say("assistant", "r")]}
    assert imitated(talk) == chatml(*first, *talk["messages"])[:-1]
    assert imitated({**talk, "messages": [say("system", "Be brief."), *talk["messages"]]}) == chatml(
        say("system", "Be brief."), say("user", "q"), say("assistant", "r")
    )[:-1]  # fmt: skip


def test_system_messages_that_contradict_are_refused() -> None:
    row: dict[str, Any] = {"system": "Be brief.", "question": "q"}
    with pytest.raises(DataError, match=r"row 0 .* has a system message of its own, but data\.system_prompt is set"):
        prompt_of(row, system_prompt="Be long.")
    with pytest.raises(DataError, match=r"row 0 .* has a system message of its own, but data\.system_prompt is set"):
        prompt_of(row, PLAIN, system_prompt="Be long.")
    with pytest.raises(
        DataError, match=r"system message under 'system' \(data\.system_key\) and another one in its messages; one"
    ):
        prompt_of({**row, "question": [say("system", "Be long."), say("user", "q")]})
    with pytest.raises(
        DataError, match=r"row 0 .* has 7 under 'system' \(data\.system_key\); it must be text, or system_key null"
    ):
        prompt_of({**row, "system": 7})


THINKING = CHATML.replace(
    "{{ m.content }}", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
)
PART = CHATML.replace("{{ m.content }}", "{{ m['thinking'] }}{{ m.content }}{# enable_reasoning #}")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize(("template", "wanted"), [(THINKING, "<think>Hm</think>r"), (PART, "Hmr")])
def test_what_the_assistant_thought_is_under_the_name_that_the_template_reads(key: str, template: str, wanted: str) -> None:
    messages = [say("user", "q"), {**say("assistant", "r"), key: "Hm", "weight": 1}]
    assert imitated({"messages": messages}, byte_tokenizer(template)).endswith(f"assistant\n{wanted}<|end|>")
    with pytest.raises(DataError, match=f"the chat template leaves out '{key}' of message 1 "):
        imitated({"messages": messages}, byte_tokenizer(CHATML))


def messages_of(value: Any) -> Any:
    """Messages as the builder takes them."""
    from megarl.data.chat import ChatTemplate
    from megarl.data.rows import Origin, RowPlace

    return ChatTemplate(CHAT, "auto", None).messages(value, "messages", RowPlace(Origin("data"), 0))


def test_keys_of_messages_stay() -> None:
    given = [{"from": "gpt", "value": "r", "weight": 0}, {"role": "user", "content": "q", "name": "me", "weight": 0.5}]
    assert messages_of(given) == [{"role": "assistant", "content": "r", "weight": 0}, given[1]]


def test_trees_of_oasst_have_messages_with_text() -> None:
    given = [{"role": "prompter", "text": "q", "lang": "en"}, {"role": "assistant", "text": "r"}]
    assert messages_of(given) == [{"role": "user", "content": "q", "lang": "en"}, {"role": "assistant", "content": "r"}]


def test_several_calls_may_stand_in_one_message() -> None:
    value = json.dumps([{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": '{"b": 2}'}])
    (message,) = messages_of([{"from": "function_call", "value": value}])
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}},
    ]  # fmt: skip
    assert messages_of([{"from": "function_call", "value": "f(1)"}]) == [say("assistant", "f(1)")]  # no JSON: as it is said


def test_messages_may_be_the_json_text_of_a_cell(tmp_path: Path) -> None:
    messages = [say("user", "q"), say("assistant", "r")]
    file = tmp_path / "rows.tsv"
    file.write_text("messages\n" + '"' + json.dumps(messages).replace('"', '""') + '"\n')
    (row,) = load_rows(SourceConfig(path=str(file)))
    assert imitated(row, messages_key="messages") == chatml(*messages)[:-1]


def test_a_default_key_that_rows_lack_is_answered_with_theirs() -> None:
    with pytest.raises(
        DataError, match=r"no key 'question' \(data\.prompt_key\) \(did you mean 'prompt'\?\); it has prompt, answer"
    ):
        prompt_of({"prompt": "q", "answer": "a"})


def test_inspect_shows_files_of_every_kind_and_prompts_of_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.csv").write_text("instruction,input,response\nAdd.,1+1,2\n")
    settings = SupervisedSettings(prompt="{instruction}\n{input}")
    inspect(str(tmp_path / "rows.csv"), str(tmp_path / "model"), settings)
    out = capsys.readouterr().out
    assert "rows.csv: 1 row as sft" in out
    assert "<|start|>user\nAdd.\n1+1<|end|>\n<|start|>assistant\n⟦2<|end|>⟧" in out
    (tmp_path / "rows.csv").write_text("instruction,input\nAdd.,1+1\n")
    inspect(str(tmp_path), str(tmp_path / "model"), settings)
    assert "as prompts" in (out := capsys.readouterr().out)
    assert "<|start|>user\nAdd.\n1+1<|end|>" in out
