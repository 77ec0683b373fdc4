"""Conversations tokenised at once have the ids and masks of rendering and tokenising every prefix for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.span_ids import SpanTokeniser
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.data.turn_shapes import LEARNT_AFTER
from megarl.errors import DataError
from tests.data.chat_tokenizers import byte_tokenizer
from tests.data.family_templates import FAMILIES
from tests.data.test_turn_ends import EACH, TOGETHER, tokenizer_of

TRICKY = (
    "</think>",
    "<think>\nb\n</think>\n\n",
    " ",
    "\n",
    "<|im_end|>",
    '"',
    "{{ x }}",
    "\\",
    "/nothink",
    "<|user|>",
    "é",
    "1",
)


def prefix_by_prefix(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids and mask as they are where each turn's end token is the last special token of it."""
    spans: list[tuple[str, bool]] = []
    done = ""
    special = sorted(tokenizer.all_special_tokens + [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special])
    for turn in range(1, len(messages), 2):
        before = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        through = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        end = max(through.rfind(token) + len(token) for token in special if token in through)
        spans += [(before[len(done) :], False), (through[len(before) : end], True)]
        done = through[:end]
    ids: list[int] = []
    mask: list[int] = []
    for at, (text, is_trained) in enumerate(spans):
        whole = tokenizer("".join(piece for piece, _ in spans[: at + 1]), add_special_tokens=False)["input_ids"]
        alone = tokenizer(text, add_special_tokens=False)["input_ids"]
        more = whole[len(ids) :] if whole[: len(ids)] == ids else alone
        ids += more
        mask += [int(is_trained)] * len(more)
    return ids, mask


def conversation(contents: list[str]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="<|>"), max_size=12)
MERGES = (("a", "b"), ("Ċ", "a"), ("Ċ", "Ċ"), ("Ġ", "a"), ("b", "b"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.text("ab \n", max_size=6) | WORDS, min_size=4, max_size=4), min_size=2, max_size=4))
def test_ids_and_masks_are_those_of_every_prefix_tokenised_for_itself(rows: list[list[str]]) -> None:
    tokenizer = byte_tokenizer(merges=MERGES)
    builder = SupervisedBuilder(tokenizer, "sft", SupervisedSettings())
    builder._tokeniser._checks_left = 0  # which would mend what differs
    built = builder.build([{"messages": conversation(row)} for row in rows], prefix="train")
    for sample, row in zip(built, rows, strict=True):
        ids, mask = prefix_by_prefix(tokenizer, conversation(row))
        first = mask.index(1)
        assert (sample.prompt_ids, sample.response_ids, sample.sampled_mask) == (ids[:first], ids[first:], mask[first:])


PIECES = st.lists(
    st.text("ab\n", max_size=5) | st.sampled_from(["<|end|>", "<|start|>", "<|en", "d|>", "</s>a"]), min_size=1, max_size=6
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=3))
def test_pieces_may_be_cut_anywhere(texts: list[list[str]]) -> None:
    tokenizer = byte_tokenizer(merges=MERGES)
    tokeniser = SpanTokeniser(tokenizer, special=False)
    tokeniser._checks_left = 0
    assert tokeniser.ids(texts) == [tokeniser._prefix_by_prefix(pieces) for pieces in texts]


def test_a_tokenizer_whose_ids_differ_is_asked_for_every_prefix() -> None:
    tokenizer = byte_tokenizer(merges=MERGES)
    tokeniser = SpanTokeniser(tokenizer, special=False)
    right = tokeniser._prefix_by_prefix(["a", "<|end|>b"])
    tokeniser._kept["<|end|>b"] = [99]  # as if special tokens did not part its texts
    assert tokeniser.ids([["a", "<|end|>b"]]) == [right]
    assert tokeniser._pattern is None


def tricky_rows() -> list[list[str]]:
    """Contents with texts at which templates look, at every end and in every turn."""
    around = [[f"{t}q", f"a{t}", "q", "a"] for t in TRICKY] + [["q", f"{t}a", f"q{t}", f"{t}a{t}"] for t in TRICKY]
    return [*around, *([f"q{t}q", "a", "q", f"a{t}a"] for t in TRICKY), ["", "a", "q", "a"], ["q", "", "q", ""]]


@pytest.mark.parametrize("name", list(EACH))
def test_a_shape_is_filled_in_as_the_template_would_render_it(name: str, tmp_path: Path) -> None:
    builder = SupervisedBuilder(tokenizer_of(FAMILIES[name], tmp_path), "sft", SupervisedSettings(turns="each"))
    for shapes in [builder._shapes_of_each, *([builder._shapes] if name in TOGETHER else [])]:
        for contents in (*[["q", "a"] * 2] * (LEARNT_AFTER + 1), *tricky_rows()):
            asked = builder._conversation({}, conversation(contents), None, 0)[0]  # type: ignore[arg-type]
            assert answer_of(shapes.spans, asked) == answer_of(shapes.cut, builder.turns, asked)
        assert list(shapes._known.values()) != [None], "no family looks at what it writes in another way"


def answer_of(work: Any, *arguments: Any) -> Any:
    try:
        return work(*arguments)
    except DataError as error:
        return str(error)


def learnt(template: str) -> bool:
    builder = SupervisedBuilder(byte_tokenizer(template), "sft", SupervisedSettings(ignore_fields=("content",)))
    builder.build([{"messages": conversation(["q", "a"])}] * (LEARNT_AFTER + 1), prefix="train")
    (shape,) = builder._shapes._known.values()
    return shape is not None


HEAD = "{% for m in messages %}<|start|>{{ m.role }}\n"
TAIL = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("written", "is_learnt"),
    [
        ("{{ m.content }}", True),
        ("{{ m.content | trim }}", True),
        ("{{ 'x' ~ m['content'].strip() + 'y' }}", True),
        ("{% if '!' in m.content %}{{ m.content.split('!')[-1] }}{% else %}{{ m.content }}{% endif %}", True),
        ("{{ m.content | upper }}", False),
        ("{{ m.content | length }}{{ m.content }}", False),
        ("{{ m.content | tojson }}", False),
        ("{{ m.content | replace('b', 'c') }}", False),
        ("{{ m.content[:3] }}", False),
        ("{{ ('x' + m.content)[:9] }}", False),
        ("{{ m.content if m.content.split()[0] == 'a' else '' }}", False),
    ],
)
def test_only_what_writes_contents_as_they_are_is_learnt(written: str, is_learnt: bool) -> None:
    assert learnt(HEAD + written + TAIL) == is_learnt


def test_conversations_of_a_known_shape_are_not_rendered() -> None:
    builder = SupervisedBuilder(byte_tokenizer(), "sft", SupervisedSettings())
    rendered = []
    render = builder.template.render
    builder.template.render = lambda *a, **k: rendered.append(1) or render(*a, **k)  # type: ignore[method-assign]
    builder.build([{"messages": conversation(["q", f"a{n}", "r", "b"])} for n in range(20)], prefix="train")
    learning = len(rendered)
    builder.build([{"messages": conversation(["q", f"c{n}", "r", "b"])} for n in range(20)], prefix="train")
    assert 0 < len(rendered) == learning
