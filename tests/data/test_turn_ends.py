"""The token that ends a turn is learnt: for each family's published template, the trained text with its end."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megarl.data.sample import Sample
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.errors import DataError
from tests.data.chat_tokenizers import family_tokenizer
from tests.data.family_templates import FAMILIES, Family

CHAT = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": "1"}}}
CALLING = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "add"},
    {"role": "assistant", "content": "a2"},
]
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n</tool_call>'
EMPTY = "<think>\n\n</think>\n\n"
END_OF_V3 = "<｜end▁of▁sentence｜>"

TOGETHER = {
    "ChatML": ["a1<|im_end|>", "a2<|im_end|>"],
    "Qwen2": ["a1<|im_end|>", "a2<|im_end|>"],
    "Qwen2.5": ["a1<|im_end|>", "a2<|im_end|>"],
    "Llama 2": [" a1 </s>", " a2 </s>"],
    "Llama 3": ["a1<|eot_id|>", "a2<|eot_id|>"],
    "Llama 3.1": ["a1<|eot_id|>", "a2<|eot_id|>"],
    "Llama 4": ["a1<|eot|>", "a2<|eot|>"],
    "Mistral v1": ["a1</s>", "a2</s>"],
    "Mixtral": ["a1</s>", "a2</s>"],
    "Mistral v3": [" a1</s>", " a2</s>"],
    "Mistral v7": ["a1</s>", "a2</s>"],
    "Gemma 2": ["a1<end_of_turn>", "a2<end_of_turn>"],
    "Gemma 3": ["a1<end_of_turn>", "a2<end_of_turn>"],
    "Phi-3": ["a1<|end|>", "a2<|end|>"],
    "Phi-4": ["a1<|im_end|>", "a2<|im_end|>"],
    "GLM-4": ["a1<|user|>", "a2<|user|>"],
    "GLM-4.5": ["\n<think></think>\na1<|user|>", "\n<think></think>\na2<|user|>"],
    "GLM-4.6": ["\n<think></think>\na1<|user|>", "\n<think></think>\na2<|user|>"],
    "DeepSeek-V2": [f" a1{END_OF_V3}", f" a2{END_OF_V3}"],
    "DeepSeek-V3": [f"a1{END_OF_V3}", f"a2{END_OF_V3}"],
    "DeepSeek-V3.1": [f"a1{END_OF_V3}", f"a2{END_OF_V3}"],
    "Kimi-K2": ["a1<|im_end|>", "a2<|im_end|>"],
    "OLMo 2": ["a1<|endoftext|>", "a2<|endoftext|>"],
    "OLMo 3": ["a1<|im_end|>", "a2<|endoftext|>"],
    "SmolLM2": ["a1<|im_end|>", "a2<|im_end|>"],
    "SmolLM3": ["a1<|im_end|>", "a2<|im_end|>"],
    "Granite 3": ["a1<|end_of_text|>", "a2<|end_of_text|>"],
    "Seed-OSS": ["a1<seed:eos>", "a2<seed:eos>"],
    "MiniMax": ["a1<end_of_sentence>", "a2<end_of_sentence>"],
    "Zephyr": ["a1</s>", "a2</s>"],
    "Vicuna": [" a1</s>", " a2</s>"],
}
"""The trained runs of CHAT, in one sample."""
EACH = TOGETHER | {
    "OLMo 3": ["a1<|endoftext|>", "a2<|endoftext|>"],
    "Qwen3": [f"{EMPTY}a1<|im_end|>", f"{EMPTY}a2<|im_end|>"],
    "Qwen3-Thinking": ["\n</think>\n\na1<|im_end|>", "\n</think>\n\na2<|im_end|>"],
    "gpt-oss": [f"<|channel|>final<|message|>a{n}<|return|>" for n in (1, 2)],
}
"""The trained texts of CHAT where each turn is a sample."""
CALLS = {
    "Qwen2.5": [f"{QWEN_CALL}<|im_end|>", "a2<|im_end|>"],
    "Qwen3": [f"{EMPTY}\n{QWEN_CALL}<|im_end|>", f"{EMPTY}a2<|im_end|>"],
    "Llama 3.1": ['{"name": "add", "parameters": {"a": "1"}}<|eot_id|>', "a2<|eot_id|>"],
    "Mistral v3": ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": "1"}}]</s>', " a2</s>"],
    "GLM-4.5": [f"\n<think></think>\n{GLM_CALL}<|observation|>", "\n<think></think>\na2<|user|>"],
    "Kimi-K2": [
        '<|tool_calls_section_begin|><|tool_call_begin|>call00001<|tool_call_argument_begin|>{"a": "1"}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>",
        "a2<|im_end|>",
    ],
}
"""The trained texts of CALLING where each turn is a sample."""


def tokenizer_of(family: Family, folder: Path, template: str | None = None) -> Any:
    tokenizer = family_tokenizer(
        template or family.template,
        special=family.special,
        plain=family.plain,
        eos=family.eos,
        bos=family.bos,
        folder=str(folder),
    )
    if family.stops:
        ids = tokenizer.convert_tokens_to_ids(list(family.stops))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}))
    return tokenizer


def samples(tokenizer: Any, messages: list[dict[str, Any]], **fields: Any) -> list[Sample]:
    return SupervisedBuilder(tokenizer, "sft", SupervisedSettings(**fields)).build([{"messages": messages}], prefix="train")


def trained_runs(tokenizer: Any, sample: Sample) -> list[str]:
    """The text of every run of trained tokens."""
    kept = zip(sample.response_ids, sample.sampled_mask, strict=True)
    return [tokenizer.decode([i for i, _ in run]) for is_trained, run in groupby(kept, key=lambda pair: pair[1]) if is_trained]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_turn_of_a_family_is_trained_with_its_end(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FAMILIES[name], tmp_path)
    if name in TOGETHER:
        (sample,) = samples(tokenizer, CHAT)
        assert trained_runs(tokenizer, sample) == TOGETHER[name]
        whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
        text = tokenizer.decode(sample.prompt_ids + sample.response_ids)
        assert text == whole[: len(text)] or text == whole + "<|user|>"  # nothing else is put into the conversation
    elif name != "DeepSeek-R1":
        with pytest.raises(DataError, match=r"renders the messages before message 3 .* set data\.turns to 'each'"):
            samples(tokenizer, CHAT)


@pytest.mark.parametrize("name", list(EACH))
def test_each_turn_stands_behind_the_prompt_that_asks_for_it(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FAMILIES[name], tmp_path)
    built = samples(tokenizer, CHAT, turns="each")
    assert [sample.sample_id for sample in built] == ["train-0/turn-1", "train-0/turn-2"]
    assert [trained_runs(tokenizer, sample) for sample in built] == [[text] for text in EACH[name]]
    for sample, at in zip(built, (1, 3), strict=True):
        prompt = tokenizer.apply_chat_template(CHAT[:at], tokenize=False, add_generation_prompt=True)
        text = tokenizer.decode(sample.prompt_ids + sample.response_ids)
        assert text == prompt + EACH[name][at // 2]
    (last,) = samples(tokenizer, CHAT, turns="last")
    whole = built[1].prompt_ids + built[1].response_ids
    assert (last.sample_id, last.prompt_ids + last.response_ids) == ("train-0", whole)
    assert set(last.sampled_mask) == {1}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_turn_that_calls_tools_ends_as_generation_ends_it(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FAMILIES[name], tmp_path)
    built = samples(tokenizer, CALLING, turns="each")
    assert [trained_runs(tokenizer, sample) for sample in built] == [[text] for text in CALLS[name]]
    (alone,) = samples(tokenizer, CALLING[:2])  # and where nothing follows the call
    assert trained_runs(tokenizer, alone) == [CALLS[name][0]]


def test_a_turn_that_an_unanswered_message_follows_ends_with_its_marker(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FAMILIES["GLM-4"], tmp_path)
    (sample,) = samples(tokenizer, CHAT[:3])
    assert tokenizer.decode(sample.prompt_ids + sample.response_ids) == "[gMASK]<sop><|user|>\nq1<|assistant|>\na1<|user|>"


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def test_a_template_without_any_mark_ends_the_last_turn_with_the_end_token_and_refuses_turns_inside(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(Family(PLAIN, ("</s>",), "</s>"), tmp_path)
    (sample,) = samples(tokenizer, CHAT[:2])
    assert trained_runs(tokenizer, sample) == [" a1</s>"]
    with pytest.raises(DataError, match=r"row 0 .*: the end of message 1 .* cannot be told: .* set data\.turns to 'each'"):
        samples(tokenizer, CHAT)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"row 0 .*: the end of an assistant's turn cannot be told: .*eos_token_id"):
        samples(tokenizer, CHAT[:2])


def test_an_end_that_is_a_text_is_trained_and_told(tmp_path: Path) -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content }} [end]")
    tokenizer = tokenizer_of(Family(template, ("</s>",), "</s>"), tmp_path)
    (sample,) = samples(tokenizer, CHAT)
    assert trained_runs(tokenizer, sample) == [" a1 [end]", " a2 [end]"]
    told = SupervisedBuilder(tokenizer, "sft", SupervisedSettings()).turns.ends.describe()
    assert told == "a turn ends with the text ' [end]', which is no token: generation does not stop there (it stops at </s>)"


@pytest.mark.parametrize(
    ("family", "told"),
    [
        (FAMILIES["Qwen3"], "a turn ends with <|im_end|>"),
        (FAMILIES["GLM-4"], "a turn ends with the marker of the next role: <|user|> (user), <|observation|> (tool)"),
        (
            Family(FAMILIES["ChatML"].template, FAMILIES["ChatML"].special, "<|endoftext|>"),
            "a turn ends with <|im_end|>, at which generation does not stop (it stops at <|endoftext|>): name it under "
            "eos_token_id in the model's generation_config.json",
        ),
        (Family(PLAIN, ("</s>",), "</s>"), "a turn that nothing follows ends with </s>; the template writes no end"),
    ],
)
def test_the_end_of_turns_is_told(family: Family, told: str, tmp_path: Path) -> None:
    ends = SupervisedBuilder(tokenizer_of(family, tmp_path), "sft", SupervisedSettings()).turns.ends
    assert ends.describe() == told


def test_the_marker_of_a_role_is_an_end_only_where_generation_stops_at_it(tmp_path: Path) -> None:
    family = FAMILIES["GLM-4"]
    tokenizer = tokenizer_of(Family(family.template, family.special, family.eos), tmp_path)
    (sample,) = samples(tokenizer, CHAT[:2])
    assert trained_runs(tokenizer, sample) == ["a1<|endoftext|>"]
    with pytest.raises(DataError, match=r"the end of message 1 .* cannot be told"):
        samples(tokenizer, CHAT)


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b"}, [["a<|user|>"], ["b<|user|>"]]),
        ("kto", {"prompt": "q", "response": "a", "label": True}, [["a<|user|>"]]),
        ("steps", {"prompt": "q", "steps": ["a", "b"], "label": [1, 0]}, [["\n", "<|user|>"]]),
    ],
)
def test_preferences_labels_and_judged_steps_end_alike(kind: Any, row: Any, expected: list[list[str]], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FAMILIES["GLM-4"], tmp_path)
    built = SupervisedBuilder(tokenizer, kind, SupervisedSettings()).build([row], prefix="train")
    assert [trained_runs(tokenizer, sample) for sample in built] == expected
