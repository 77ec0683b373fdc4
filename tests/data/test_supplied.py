"""Tokens that the prompt supplies are not trained on; what the model writes behind it is, however it is rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.errors import DataError
from tests.data.family_templates import FAMILIES
from tests.data.test_turn_ends import CHAT, samples, tokenizer_of, trained_runs

PLAIN = CHAT[:2]
THOUGHT = [CHAT[0], {"role": "assistant", "content": "<think>\nwhy\n</think>\n\na1"}]
SPARE = [CHAT[0], {"role": "assistant", "content": "why</think>a1"}]
END = "<｜end▁of▁sentence｜>"

CASES = [
    # without options Qwen3's and GLM's templates leave the thought to the model, an empty one too
    ("Qwen3", PLAIN, {}, "<think>\n\n</think>\n\na1<|im_end|>"),
    ("Qwen3", THOUGHT, {}, "<think>\nwhy\n</think>\n\na1<|im_end|>"),
    ("Qwen3", THOUGHT, {"enable_thinking": True}, "<think>\nwhy\n</think>\n\na1<|im_end|>"),
    ("Qwen3", PLAIN, {"enable_thinking": False}, "a1<|im_end|>"),
    ("GLM-4.5", PLAIN, {}, "\n<think></think>\na1<|user|>"),
    ("GLM-4.5", THOUGHT, {}, "\n<think>why</think>\na1<|user|>"),
    ("GLM-4.5", PLAIN, {"enable_thinking": False}, "\na1<|user|>"),
    # DeepSeek-V3.1 asks with the end of a thought, or with its beginning, and renders none of it
    ("DeepSeek-V3.1", PLAIN, {}, f"a1{END}"),
    ("DeepSeek-V3.1", PLAIN, {"thinking": True}, f"</think>a1{END}"),
    ("DeepSeek-V3.1", SPARE, {"thinking": True}, f"why</think>a1{END}"),
    ("DeepSeek-R1", THOUGHT, {}, f"why\n</think>\n\na1{END}"),
    # the beginning of a thought is supplied
    ("Qwen3-Thinking", THOUGHT, {}, "why\n</think>\n\na1<|im_end|>"),
    ("Qwen3-Thinking", PLAIN, {}, "\n</think>\n\na1<|im_end|>"),
    ("SmolLM3", PLAIN, {"enable_thinking": False}, "a1<|im_end|>"),
    ("SmolLM3", PLAIN, {}, "a1<|im_end|>"),
    # the template renders no thought where the prompt has an empty one
    ("Seed-OSS", PLAIN, {"thinking_budget": 0}, "a1<seed:eos>"),
    ("Seed-OSS", PLAIN, {}, "a1<seed:eos>"),
]


@pytest.mark.parametrize(("family", "messages", "args", "trained"), CASES)
def test_the_model_is_trained_on_what_it_would_write(
    family: str, messages: list[dict[str, Any]], args: dict[str, Any], trained: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(FAMILIES[family], tmp_path)
    (sample,) = samples(tokenizer, messages, template_args=args)
    assert trained_runs(tokenizer, sample) == [trained]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, **args)
    assert tokenizer.decode(sample.prompt_ids) == prompt


@pytest.mark.parametrize(
    ("family", "messages", "args", "sentence"),
    [
        (
            "Qwen3",
            THOUGHT,
            {"enable_thinking": False},
            r"message 1 .* has reasoning, but the prompt before it ends with '</think>'",
        ),
        ("GLM-4.5", THOUGHT, {"enable_thinking": False}, r"message 1 .* has reasoning"),
        ("DeepSeek-V3.1", SPARE, {}, r"message 1 .* has reasoning"),
        ("DeepSeek-R1", PLAIN, {}, r"message 1 .* has no reasoning, but the prompt before it ends with '<think>'"),
    ],
)
def test_a_turn_that_does_not_go_with_its_prompt_is_refused(
    family: str, messages: list[dict[str, Any]], args: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=sentence):
        samples(tokenizer_of(FAMILIES[family], tmp_path), messages, template_args=args)


def test_a_rows_own_options_decide_for_it(tmp_path: Path) -> None:
    from megarl.data.supervised import SupervisedBuilder, SupervisedSettings

    tokenizer = tokenizer_of(FAMILIES["Qwen3"], tmp_path)
    builder = SupervisedBuilder(tokenizer, "sft", SupervisedSettings(template_args={"enable_thinking": False}))
    rows = [{"messages": PLAIN}, {"messages": THOUGHT, "template_args": {"enable_thinking": True}}]
    runs = [trained_runs(tokenizer, sample) for sample in builder.build(rows, prefix="train")]
    assert runs == [["a1<|im_end|>"], ["<think>\nwhy\n</think>\n\na1<|im_end|>"]]
