"""Supervised samples: ids and masks are those of tokenising turn by turn by hand, and a row that does not fit is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.data.sampler import RowSampler
from megarl.data.supervised import Kind, SupervisedBuilder, SupervisedSettings
from megarl.errors import DataError
from tests.data.chat_tokenizers import FORGETFUL, byte_tokenizer, ids_of

START, END, BOS, EOS = "<|start|>", "<|end|>", "<s>", "</s>"
CHAT = byte_tokenizer()


def _build(kind: Kind, row: dict[str, Any], tokenizer: Any = CHAT, **fields: Any) -> list[Sample]:
    return SupervisedBuilder(tokenizer, kind, SupervisedSettings(**fields)).build([row], prefix="train")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _by_hand(messages: list[dict[str, str]], *, after: int = 0) -> tuple[list[int], list[int], list[int]]:
    """Prompt ids, response ids and mask of a ChatML conversation, turn by turn; trained from message `after` on."""
    ids: list[int] = []
    mask: list[int] = []
    for at, message in enumerate(messages):
        head, body = ids_of(START, f"{message['role']}\n"), ids_of(message["content"], END)
        trained = at >= after and message["role"] == "assistant"
        ids += head + body + ids_of("\n")
        mask += [0] * len(head) + [int(trained)] * len(body) + [0]
    first, last = mask.index(1), len(mask) - mask[::-1].index(1)
    return ids[:first], ids[first:last], mask[first:last]


def _parts(sample: Sample) -> tuple[list[int], list[int], list[int]]:
    return sample.prompt_ids, sample.response_ids, sample.sampled_mask


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="<|>"), max_size=12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_conversation_is_trained_exactly_on_its_assistant_turns(
    turns: list[tuple[str, str]], has_system: bool, asks_on: bool
) -> None:
    messages = [_turn("system", "s")] if has_system else []
    for question, answer in turns:
        messages += [_turn("user", question), _turn("assistant", answer)]
    messages += [_turn("user", "unanswered")] if asks_on else []
    (sample,) = _build("sft", {"messages": messages}, messages_key="messages")
    assert _parts(sample) == _by_hand(messages)
    assert sample.response_ids[-1] == 3  # a response ends with its end token, not with the line break behind it
    assert (sample.rollout_log_probs, sample.weight_versions, sample.labels) == ([], [], [])


def test_prompt_and_response_are_a_conversation_of_one_answer() -> None:
    messages = [_turn("system", "Be brief."), _turn("user", "1+1?"), _turn("assistant", "2")]
    (sample,) = _build("sft", {"prompt": "1+1?", "response": "2"}, system_prompt="Be brief.")
    assert _parts(sample) == _by_hand(messages)
    (listed,) = _build("sft", {"prompt": messages[:2], "response": "2"})
    assert _parts(listed) == _parts(sample)
    assert (sample.sample_id, sample.row_id, sample.group_id) == ("train-0", "train-0", "train-0")
    # An earlier answer that is part of the prompt is not trained on.
    longer = [_turn("user", "a"), _turn("assistant", "b"), _turn("user", "c"), _turn("assistant", "d")]
    (sample,) = _build("sft", {"prompt": longer[:3], "response": "d"})
    assert _parts(sample) == _by_hand(longer, after=3)


def test_plain_text_ends_with_the_tokenizers_end_token() -> None:
    for tokenizer, fields in ((byte_tokenizer(None), {}), (CHAT, {"chat_template": "never"})):
        (sample,) = _build("sft", {"prompt": "1+1=", "response": " 2"}, tokenizer, **fields)
        assert _parts(sample) == (ids_of(BOS, "1+1="), ids_of(" 2", EOS), [1, 1, 1])


def test_a_response_does_not_change_the_ids_of_its_prompt() -> None:
    """`=` and `2` merge into one token, but the prompt ends in `=` as it does when an engine is asked."""
    tokenizer = byte_tokenizer(None, merges=(("=", "2"),))
    assert len(tokenizer("1=2", add_special_tokens=False)["input_ids"]) == 2
    (sample,) = _build("sft", {"prompt": "1=", "response": "2=2"}, tokenizer)
    merged = tokenizer.convert_tokens_to_ids("=2")
    assert _parts(sample) == (ids_of(BOS, "1="), [*ids_of("2"), merged, 1], [1, 1, 1])


def test_a_pair_is_two_samples_with_one_prompt_and_one_group() -> None:
    pair = _build("pairs", {"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert [(s.sample_id, s.group_id, s.row_id) for s in pair] == [
        ("train-0/chosen", "train-0", "train-0"), ("train-0/rejected", "train-0", "train-0"),
    ]  # fmt: skip
    for sample, text in zip(pair, ("good", "bad"), strict=True):
        assert _parts(sample) == _by_hand([_turn("user", "q"), _turn("assistant", text)])


@pytest.mark.parametrize("margin", [-0.5, float("inf"), float("nan"), True, "1", None])
def test_the_margin_of_a_pair_is_a_number(margin: Any) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert _build("pairs", row | {"m": 0.5}, margin_key="m")[0].row["m"] == 0.5
    with pytest.raises(DataError, match=r"data\.train row 0 .*'m'; the margin of a pair must be a number of at least 0"):
        _build("pairs", row | {"m": margin}, margin_key="m")
    with pytest.raises(DataError, match=r"has no key 'm' \(data\.margin_key\)"):
        _build("pairs", row, margin_key="m")


def test_two_message_lists_are_trained_on_after_their_common_beginning() -> None:
    shared = [_turn("user", "a"), _turn("assistant", "b"), _turn("user", "c")]
    more = [_turn("assistant", "y"), _turn("user", "e"), _turn("assistant", "z")]
    row = {"chosen": [*shared, _turn("assistant", "x")], "rejected": [*shared, *more]}
    chosen, rejected = _build("pairs", row)
    assert _parts(chosen) == _by_hand(row["chosen"], after=3)
    assert _parts(rejected) == _by_hand(row["rejected"], after=3)
    assert chosen.prompt_ids == rejected.prompt_ids
    answers = {"prompt": "q", "chosen": [_turn("assistant", "x")], "rejected": [_turn("assistant", "y")]}
    assert [_parts(s) for s in _build("pairs", answers)] == [
        _parts(s) for s in _build("pairs", {"prompt": "q", "chosen": "x", "rejected": "y"})
    ]


@pytest.mark.parametrize("side", ["same", [_turn("user", "q"), _turn("assistant", "same")]])
def test_equal_sides_are_an_error_or_dropped_and_counted(side: Any) -> None:
    row = {"prompt": "q", "chosen": side, "rejected": side}
    with pytest.raises(DataError, match=r"data\.train row 0 .* same tokens under 'chosen' and 'rejected'.*equal_pairs"):
        _build("pairs", row)
    builder = SupervisedBuilder(CHAT, "pairs", SupervisedSettings(equal_pairs="drop"))
    kept = builder.build([row, {"prompt": "q", "chosen": "a", "rejected": "b"}], prefix="train")
    assert [sample.sample_id for sample in kept] == ["train-1/chosen", "train-1/rejected"]
    assert builder.dropped == {"overlong": 0, "equal_pairs": 1, "bad_pictures": 0, "not_kept": 0}
    with pytest.raises(DataError, match=r"data\.train gives no samples: of 1 row 1 dropped as equal_pairs"):
        SupervisedBuilder(CHAT, "pairs", SupervisedSettings(equal_pairs="drop")).build([row], prefix="train")


@pytest.mark.parametrize("label", [True, False])
def test_a_labelled_response_carries_its_label_on_every_trained_token(label: bool) -> None:
    (sample,) = _build("kto", {"prompt": "q", "response": "abc", "label": label})
    assert _parts(sample) == _by_hand([_turn("user", "q"), _turn("assistant", "abc")])
    assert sample.labels == [float(label)] * 4


def test_steps_are_marked_on_their_last_tokens() -> None:
    row = {"prompt": "q", "steps": ["one", "two\n", "so 3"], "label": [1, 0.25, False]}
    (sample,) = _build("steps", row)
    assert sample.prompt_ids == ids_of(START, "user\nq", END, "\n", START, "assistant\n")
    assert sample.response_ids == ids_of("one\ntwo\nso 3", END)
    assert sample.sampled_mask == [0, 0, 0, 1] * 2 + [0, 0, 0, 0, 1]
    assert sample.labels == [1.0, 0.25, 0.0]
    (plain,) = _build("steps", row, byte_tokenizer(None))
    assert (plain.response_ids, plain.sampled_mask) == (ids_of("one\ntwo\nso 3", EOS), sample.sampled_mask)


def test_steps_behind_a_prompt_that_ends_in_a_merge_keep_their_places() -> None:
    tokenizer = byte_tokenizer(merges=(("o", "n"), ("Ċ", "t")))
    (sample,) = _build("steps", {"prompt": "q", "steps": ["on", "to"], "label": [0, 1]}, tokenizer)
    on = tokenizer.convert_tokens_to_ids("on")
    assert sample.response_ids == [on, *ids_of("\n", "to", END)]  # the step ends before 'Ċt' could merge over its end
    assert sample.sampled_mask == [0, 1, 0, 0, 1]


def test_overlong_rows_are_an_error_or_dropped_and_counted_and_a_pair_goes_as_a_whole() -> None:
    rows = [{"prompt": "q", "chosen": "x" * n, "rejected": "y"} for n in (2, 9, 3)]
    tokenizer = byte_tokenizer(None)  # <s> q x*n </s>
    builder = SupervisedBuilder(tokenizer, "pairs", SupervisedSettings(max_tokens=6, overlong="drop"))
    kept = [sample.sample_id for sample in builder.build(rows, prefix="train")]
    assert kept == ["train-0/chosen", "train-0/rejected", "train-2/chosen", "train-2/rejected"]
    assert builder.dropped == {"overlong": 1, "equal_pairs": 0, "bad_pictures": 0, "not_kept": 0}
    with pytest.raises(DataError, match=r"row 1 .* has 12 tokens, but data\.max_tokens is 6"):
        SupervisedBuilder(tokenizer, "pairs", SupervisedSettings(max_tokens=6)).build(rows, prefix="train")
    assert len(SupervisedBuilder(tokenizer, "pairs", SupervisedSettings(max_tokens=12)).build(rows, prefix="train")) == 6


CONVERSATION = [_turn("user", "a"), _turn("assistant", "b!c"), _turn("user", "d"), _turn("assistant", "e")]
PARTS_AT_USER = [[_turn("user", u), _turn("assistant", "b")] for u in ("q", "r")]


@pytest.mark.parametrize(
    ("kind", "row", "fields", "sentence"),
    [
        ("sft", {"prompt": "q", "reponse": "r"}, {}, r"no key 'response' \(data\.response_key\) \(did you mean 'reponse'\?\)"),
        ("sft", {"prompt": "q", "response": ""}, {}, "has '' under 'response' .* text that is not empty"),
        ("sft", {"prompt": "q", "response": 7}, {}, "has 7 under 'response'"),
        ("sft", {"m": "text"}, {"messages_key": "m"}, "has text under 'm', but data.messages_key names a list"),
        ("sft", {"m": [{"role": "user"}]}, {"messages_key": "m"}, "each with 'role' and 'content'"),
        ("sft", {"m": [*CONVERSATION, {"role": "user"}]}, {"messages_key": "m"}, r"whose message 4 \(counted from 0\)"),
        ("sft", {"m": [_turn("user", "q")]}, {"messages_key": "m"}, "has no assistant turn to train on"),
        ("sft", {"m": [_turn("assistant", "q")]}, {"messages_key": "m"}, "begins with an assistant turn"),
        ("sft", {"m": CONVERSATION}, {"messages_key": "m", "chat_template": "never"}, "data.chat_template is 'never'"),
        (
            "pairs",
            {"prompt": "q", "chosen": "a", "rejected": [_turn("assistant", "b")]},
            {},
            "both must be text, or both lists",
        ),
        ("pairs", dict(zip(("chosen", "rejected"), PARTS_AT_USER, strict=True)), {}, "must share their beginning"),
        ("pairs", {"chosen": CONVERSATION, "rejected": CONVERSATION[:3]}, {}, "'rejected' has the end"),
        ("kto", {"prompt": "q", "response": "r", "label": 2}, {}, "has 2 under 'label'; .* true or false, or 1 or 0"),
        ("steps", {"prompt": "q", "steps": ["a", " "], "label": [1, 0]}, {}, "list of texts, none of them empty"),
        ("steps", {"prompt": "q", "steps": ["a", "b"], "label": [1]}, {}, "1 labels under 'label' for 2 steps"),
        ("steps", {"prompt": "q", "steps": ["a"], "label": [2]}, {}, "numbers from 0 to 1"),
    ],
)
def test_a_row_that_does_not_fit_is_named(kind: Kind, row: dict[str, Any], fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=rf"data\.train row 0 \(counted from 0\).*{sentence}"):
        _build(kind, row, **fields)


def test_a_template_whose_prefixes_do_not_match_is_refused() -> None:
    tokenizer = byte_tokenizer(FORGETFUL)
    with pytest.raises(DataError, match=r"row 0 .* renders the messages before message 3 .* otherwise once that one follows"):
        _build("sft", {"messages": CONVERSATION}, tokenizer, messages_key="messages")
    (sample,) = _build("sft", {"messages": CONVERSATION[:2]}, tokenizer, messages_key="messages")
    assert _parts(sample) == _by_hand(CONVERSATION[:2])


def test_unknown_kind_names_the_nearest_and_an_empty_prompt_without_bos_is_refused() -> None:
    with pytest.raises(DataError, match=r"'pair' \(did you mean 'pairs'\?\); it must be one of sft, pairs, kto, steps"):
        SupervisedBuilder(CHAT, "pair", SupervisedSettings())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no token before the first one to be trained on"):
        bare = byte_tokenizer(None)
        bare.backend_tokenizer.post_processor = None
        _build("sft", {"prompt": "", "response": "r"}, bare)


def test_batch_has_rollout_log_probs_only_where_an_engine_made_the_samples() -> None:
    given = _build("steps", {"prompt": "q", "steps": ["a", "bc"], "label": [1, 0.5]})[0]
    batch = Batch([given])
    assert set(batch.columns) == {"labels"}
    assert batch.mask.int().tolist() == [[0, 1, 0, 0, 1]]
    assert torch.equal(batch.columns["labels"], torch.tensor([[0, 1, 0, 0, 0.5]]))
    made = Sample("s", "g", "r", [1], [2, 3], [1, 1], [-0.5, -1.5], [0, 0], "stop")
    assert Batch([made]).columns["rollout_log_probs"].tolist() == [[-0.5, -1.5]]
    assert set(Batch([made]).columns) == {"rollout_log_probs"}
    assert not Batch([given, made]).columns


@pytest.mark.parametrize(
    ("log_probs", "versions", "labels"),
    [([-1.0], [], []), ([], [0], []), ([-1.0], [0], []), ([], [], [1.0, 1.0])],
)
def test_a_sample_whose_lists_do_not_agree_is_refused(log_probs: list[float], versions: list[int], labels: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sample s: .* one entry per"):
        Sample("s", "g", "r", [1], [2, 3], [1, 0], log_probs, versions, "stop", labels=labels)


@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 8))
def test_pairs_are_handed_out_whole_and_a_resumed_order_is_the_uninterrupted_one(count: int, before: int, after: int) -> None:
    pairs = [
        Sample(f"train-{n}/{side}", f"train-{n}", f"train-{n}", [1], [n], [1], [], [], "stop")
        for n in range(count)
        for side in ("chosen", "rejected")
    ]
    straight = RowSampler(pairs, 3)
    everything = straight.next(before + after)
    assert [s.sample_id.rpartition("/")[2] for s in everything] == ["chosen", "rejected"] * (before + after)
    assert all(a.group_id == b.group_id for a, b in zip(everything[::2], everything[1::2], strict=True))
    assert len({s.group_id for s in everything}) == before + after
    stopped, resumed = RowSampler(pairs, 3), RowSampler(pairs, 3)
    stopped.next(before)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.next(after) == everything[2 * before :]


TOOLS = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_conversations_with_tools_are_those_of_the_template_and_calls_are_trained_on(as_text: bool, key: str) -> None:
    """As OpenAI writes them (arguments as JSON text, no content) and Parquet stores them (nulls)."""
    tokenizer = byte_tokenizer(TOOLS)
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "strict": None}}}
    arguments = {"a": 1, "b": 2}
    given = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}, "index": None}
    turns = [
        {"role": "user", "content": "1+2?", "tool_calls": None},
        {"role": "assistant", "tool_calls": [given]} | ({"content": None} if as_text else {}),
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": "3."},
    ]
    row = {key: turns, "tools": json.dumps([schema]) if as_text else [schema]}
    (sample,) = SupervisedBuilder(tokenizer, "sft", SupervisedSettings()).build([row], prefix="train")
    plain = [
        turns[0],
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]},
    ]
    own = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    text = tokenizer.apply_chat_template([*plain, *turns[2:]], tools=own, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    got = sample.prompt_ids + sample.response_ids
    assert got == ids[: len(got)]
    assert tokenizer.decode(ids[len(got) :]) == "\n"
    trained = [i for i, kept in zip(sample.response_ids, sample.sampled_mask, strict=True) if kept]
    assert tokenizer.decode(trained) == '[add {"a": 1, "b": 2}]<|end|>3.<|end|>'


MERGING = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|start|>user{% endif %}{{ '\n<answer>' + m.content }}</answer>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>\n{% endif %}"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Puts the answers of tools that follow each other into one turn of the user, as Qwen's template does."""


def test_answers_of_several_tools_stand_in_the_turn_that_the_template_makes_of_them() -> None:
    tokenizer = byte_tokenizer(MERGING)
    messages = [
        _turn("user", "q"),
        _turn("assistant", "two calls"),
        _turn("tool", "a"),
        _turn("tool", "b"),
        _turn("assistant", "c"),
    ]
    (sample,) = _build("sft", {"messages": messages}, tokenizer, messages_key="messages")
    whole = (
        f"{START}user\nq{END}\n{START}assistant\ntwo calls{END}\n"
        f"{START}user\n<answer>a</answer>\n<answer>b</answer>{END}\n{START}assistant\nc{END}"
    )
    assert tokenizer.decode(sample.prompt_ids + sample.response_ids) == whole
    trained = [i for i, kept in zip(sample.response_ids, sample.sampled_mask, strict=True) if kept]
    assert tokenizer.decode(trained) == f"two calls{END}c{END}"


def test_a_message_that_is_none_is_told_by_its_number() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "body": "a"}]
    with pytest.raises(
        DataError, match=r"whose message 1 \(counted from 0\) is \{'role': 'assistant', 'body': 'a'\}; it must be"
    ):
        SupervisedBuilder(byte_tokenizer(TOOLS), "sft", SupervisedSettings()).build([{"messages": turns}], prefix="train")
    with pytest.raises(DataError, match=r"has text under 'tools' \(data.tools_key\) that is no JSON"):
        SupervisedBuilder(byte_tokenizer(TOOLS), "sft", SupervisedSettings()).build(
            [{"messages": [turns[0], {"role": "assistant", "content": "a"}], "tools": "{"}], prefix="train"
        )
