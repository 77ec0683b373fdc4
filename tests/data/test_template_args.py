"""Options of chat templates and templates of the user's own: what they write is what transformers writes with them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data import chat_rendering
from megarl.data.chat import ChatTemplate
from megarl.data.chat_rendering import names_of
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.data.template_args import with_defaults
from megarl.data.tokenize import PromptBuilder
from megarl.errors import DataError
from tests.data.chat_tokenizers import CHATML, byte_tokenizer
from tests.data.family_templates import QWEN3
from tests.data.published_templates import OPTIONS, PUBLISHED

ROWS = SourceConfig(source="jsonl", path="rows.jsonl")
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]
OFF = {"enable_thinking": False}


def data(**more: Any) -> DataConfig:
    return DataConfig(train=ROWS, prompt_key="prompt", **more)


def written(tokenizer: Any, messages: list[dict[str, Any]], *, ask: bool, **args: Any) -> str:
    """What transformers makes of it."""
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=ask, tokenize=False, **args))


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_options_of_a_template_are_what_it_reads_and_nobody_sets(family: str) -> None:
    tokenizer = byte_tokenizer(PUBLISHED[family])
    for name in OPTIONS[family]:
        ChatTemplate(tokenizer, "auto", None, template_args={name: "today" if name == "date_string" else True})
    with pytest.raises(DataError, match=r"no_such_option.*which the chat template never reads"):
        ChatTemplate(tokenizer, "auto", None, template_args={"no_such_option": 1})
    set_by_megarl = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
    assert names_of(PUBLISHED[family]).options - set_by_megarl == OPTIONS[family]


@pytest.mark.parametrize(
    ("family", "args"),
    [("Qwen3", OFF), ("GLM-4.5", OFF), ("DeepSeek-V3.1", {"thinking": True}), ("Llama-3.1", {"date_string": "1 Jan 2026"})],
)
def test_a_prompt_is_what_transformers_writes_with_the_options(family: str, args: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(PUBLISHED[family])
    builder = PromptBuilder(tokenizer, data(template_args=args))
    (prompt,) = builder.build([{"prompt": ASKED}], prefix="train")
    expected = written(tokenizer, ASKED, ask=True, **args)
    assert prompt.prompt_text == expected != written(tokenizer, ASKED, ask=True)
    assert prompt.prompt_ids == tokenizer(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("own", [{"enable_thinking": True}, '{"enable_thinking": true}'])
def test_a_rows_own_options_go_before_the_runs(own: Any) -> None:
    tokenizer = byte_tokenizer(QWEN3)
    builder = PromptBuilder(tokenizer, data(template_args=OFF))
    rows = [{"prompt": "hi", "template_args": own}, {"prompt": "hi", "template_args": None}, {"prompt": "hi"}]
    texts = [prompt.prompt_text for prompt in builder.build(rows, prefix="train")]
    said = [{"role": "user", "content": "hi"}]
    on, off = written(tokenizer, said, ask=True), written(tokenizer, said, ask=True, **OFF)
    assert texts == [on, off, off]
    assert on != off


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sft", {"prompt": "hi", "response": "yes"}),
        ("sft", {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}),
        ("pairs", {"prompt": "hi", "chosen": "yes", "rejected": "no"}),
        ("kto", {"prompt": "hi", "response": "yes", "label": True}),
        ("steps", {"prompt": "hi", "steps": ["yes"], "label": [1]}),
    ],
)
def test_options_reach_rows_with_responses_of_every_kind(kind: Any, row: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(PUBLISHED["GLM-4.5"])
    settings = SupervisedSettings(template_args=OFF)
    sample, *_ = SupervisedBuilder(tokenizer, kind, settings).build([row], prefix="train")
    whole = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    expected = written(tokenizer, whole, ask=False, **OFF) + tokenizer.eos_token  # no message follows: the end is learnt
    assert sample.prompt_text + sample.response_text == expected
    assert "hi/nothink" in expected
    own = {**row, "template_args": {"enable_thinking": True}}
    sample, *_ = SupervisedBuilder(tokenizer, kind, settings).build([own], prefix="train")
    assert "/nothink" not in sample.prompt_text


SET = "which is not an option: megarl or the tokenizer sets it; remove it"
KINDS = "it must be text (in quotes), a number, true, false, null, or a list or mapping of these"
UNREAD = "(did you mean 'enable_thinking'?), which the chat template never reads; it reads enable_thinking"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"enable_thinkin": False}, f" has 'enable_thinkin' {UNREAD}"),
        ({"messages": []}, f" has 'messages', {SET}"),
        ({"add_generation_prompt": True}, f" has 'add_generation_prompt', {SET}"),
        ({"bos_token": "x"}, f" has 'bos_token', {SET}"),
        ({"tokenize": True}, f" has 'tokenize', {SET}"),
        ({"enable_thinking": "False"}, ".enable_thinking is the text 'False'; it must be false without quotes"),
        ({"enable_thinking": float("nan")}, f".enable_thinking is nan, a float; {KINDS}"),
        ({"enable_thinking": [{"a": object}]}, f".enable_thinking[0].a is <class 'object'>, a type; {KINDS}"),
    ],
)
def test_an_option_of_no_use_is_named(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as raised:
        PromptBuilder(byte_tokenizer(QWEN3), data(template_args=args))
    assert str(raised.value) == f"data.template_args{sentence}"


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"thinking": 1}, "row 0 (counted from 0): template_args has 'thinking' (did you mean 'enable_thinking'?), which"),
        ("{", "row 0 (counted from 0) has text under 'template_args' that is no JSON"),
        (5, "row 0 (counted from 0) has 5 under 'template_args'; it must be a mapping from options to values"),
        ({"enable_thinking": "true"}, "row 0 (counted from 0): template_args.enable_thinking is the text 'true'"),
    ],
)
def test_an_option_of_no_use_is_named_with_its_row(own: Any, sentence: str) -> None:
    for builder, row in (
        (PromptBuilder(byte_tokenizer(QWEN3), data()), {"prompt": "hi"}),
        (SupervisedBuilder(byte_tokenizer(QWEN3), "sft", SupervisedSettings()), {"prompt": "hi", "response": "yes"}),
    ):
        with pytest.raises(DataError) as raised:
            builder.build([{**row, "template_args": own}], prefix="train")
        assert sentence in str(raised.value)


def test_options_without_a_template_are_refused() -> None:
    for template, choice, why in ((CHATML, "never", "data.chat_template is 'never'"), (None, "auto", "has no chat template")):
        with pytest.raises(DataError, match=f"data.template_args has 'enable_thinking', but .*{why}"):
            PromptBuilder(byte_tokenizer(template), data(chat_template=choice, template_args=OFF))


def test_a_template_in_a_file_is_the_tokenizers(tmp_path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("\ufeff" + QWEN3)
    for had in (CHATML, None):
        tokenizer = byte_tokenizer(had)
        builder = PromptBuilder(tokenizer, data(chat_template=str(file), template_args=OFF))
        (prompt,) = builder.build([{"prompt": "hi"}], prefix="train")
        said = [{"role": "user", "content": "hi"}]
        assert prompt.prompt_text == written(byte_tokenizer(QWEN3), said, ask=True, **OFF)
        assert tokenizer.chat_template == QWEN3


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "which cannot be read: No such file or directory"),
        (b"  \n", "which is empty; it must be a Jinja template"),
        (b"{% for m in messages %}", "which is no Jinja template: Unexpected end of template"),
        (b"Hello {{ name }}", "which never reads `messages`; it must be a chat template"),
        (b"\xff\xfe{{", "which is not valid UTF-8; it must be a Jinja template"),
    ],
)
def test_a_file_that_is_no_template_is_one_sentence(content: bytes | None, why: str, tmp_path) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError) as raised:
        PromptBuilder(byte_tokenizer(), data(chat_template=str(file)))
    assert str(raised.value).startswith(f"data.chat_template is '{file}', {why}")


def test_a_file_that_loops_for_ever_is_one_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chat_rendering, "LONGEST_S", 0.3)
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
    )
    builder = PromptBuilder(byte_tokenizer(), data(chat_template=str(file)))
    with pytest.raises(DataError, match=r"does not fit the tokenizer's chat template: it took more than 0\.3 s"):
        builder.build([{"prompt": "hi"}], prefix="train")


VALUES = [False, True, None, 0, -3, 1.5, 1e-7, 1e22, "", "a", 'quote " and \\ and \n and {% x %} }}', "é 😀", [], {}]


def test_defaults_in_a_template_are_values_that_a_caller_may_still_set() -> None:
    template = "\n  {% if x is defined %}{{ x | tojson }}{% endif %}|{% for m in messages %}{{ m.content }}{% endfor %}"
    draw = random.Random(7)
    for number in range(200):
        value: Any = draw.choice(VALUES)
        if number % 2:
            value = {"a": draw.choice(VALUES), 'b "c"': [draw.choice(VALUES), {"d": draw.choice(VALUES)}]}
        plain, with_value = byte_tokenizer(template), byte_tokenizer(with_defaults(template, {"x": value}))
        assert written(with_value, ASKED, ask=False) == written(plain, ASKED, ask=False, x=value)
        assert json.loads(written(with_value, ASKED, ask=False).strip().partition("|")[0]) == value
        assert written(with_value, ASKED, ask=False, x=7) == written(plain, ASKED, ask=False, x=7)
    assert with_defaults(template, {}) == template


@pytest.mark.parametrize("family", [family for family in PUBLISHED if OPTIONS[family]])
def test_published_templates_with_defaults_write_the_same(family: str) -> None:
    (name,) = OPTIONS[family]
    told = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    for value in (True, False) if name != "date_string" else ("1 Jan 2026",):
        plain = byte_tokenizer(PUBLISHED[family])
        kept = byte_tokenizer(with_defaults(PUBLISHED[family], {name: value}))
        assert written(kept, told, ask=True) == written(plain, told, ask=True, **{name: value})
        assert names_of(kept.chat_template).options == names_of(plain.chat_template).options
        again = byte_tokenizer(with_defaults(kept.chat_template, {name: "other"}))  # trained on from what was exported
        assert written(again, told, ask=True) == written(plain, told, ask=True, **{name: "other"})
