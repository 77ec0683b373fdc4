"""Rows as TRL, OpenRLHF, verl and EasyR1 write them: their tokens are those of transformers' own chat template.

The references render with `tokenizer.apply_chat_template` and cut the prompt off as the other trainer's source does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.inspect import inspect
from megarl.data.prompts import load_rows
from megarl.data.rows import Origin, RowPlace, find_value, value_of
from megarl.data.sample import Prompt, Sample
from megarl.data.supervised import Kind, SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import DataError, RewardError
from megarl.rewards.builtin.math_verify import MathVerify
from tests.data.chat_tokenizers import CHATML, byte_tokenizer

SMOLLM2 = Path(__file__).parents[2] / "models/SmolLM2-135M-Instruct"
MARKED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""ChatML with transformers' own marks around what the assistant says."""
Message = dict[str, str]


def say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


SKY, BLUE, GREEN = say("user", "What colour is the sky?"), say("assistant", "It is blue."), say("assistant", "It is green.")
EARLIER = [say("system", "Be brief."), say("user", "Hello"), say("assistant", "Hello!")]


@pytest.fixture(params=["bytes", "SmolLM2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "bytes":
        return byte_tokenizer(CHATML)
    if not SMOLLM2.is_dir():
        pytest.skip("the model is not here")
    return load_tokenizer(str(SMOLLM2))


def build(kind: Kind, row: dict[str, Any], tokenizer: Any, **fields: Any) -> list[Sample]:
    return SupervisedBuilder(tokenizer, kind, SupervisedSettings(**fields)).build([row], prefix="train")


def reference(tokenizer: Any, prompt: list[Message], answer: list[Message]) -> tuple[list[int], list[int]]:
    """Prompt and response ids: the template of the whole begins with that of the prompt, and what is behind is the response.

    A line break behind the last end token is no part of it (docs/data.md, masks).
    """
    asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*prompt, *answer], tokenize=True, return_dict=False)
    assert whole[: len(asked)] == asked
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert whole[-len(line_break) :] == line_break
    return asked, whole[len(asked) : -len(line_break)]


def ids(sample: Sample) -> tuple[list[int], list[int]]:
    assert all(sample.sampled_mask)
    return sample.prompt_ids, sample.response_ids


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]}, [SKY]),
        ({"prompt": [*EARLIER, SKY], "chosen": [BLUE], "rejected": [GREEN]}, [*EARLIER, SKY]),
        ({"chosen": [SKY, BLUE], "rejected": [SKY, GREEN]}, [SKY]),
        ({"chosen": [*EARLIER, SKY, BLUE], "rejected": [*EARLIER, SKY, GREEN]}, [*EARLIER, SKY]),
        # UltraFeedback: the prompt is text, and the beginning of both sides
        ({"prompt": SKY["content"], "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]}, [SKY]),
        ({"prompt": [SKY], "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]}, [SKY]),
        # TRL and OpenRLHF put a prompt that is a conversation before both sides
        ({"prompt": EARLIER, "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]}, [*EARLIER, SKY]),
        ({"prompt": SKY["content"], "chosen": BLUE["content"], "rejected": GREEN["content"]}, [SKY]),
    ],
)
def test_preferences_of_trl_and_openrlhf(row: dict[str, Any], prompt: list[Message], tokenizer: Any) -> None:
    pair = build("pairs", row, tokenizer)
    assert [ids(side) for side in pair] == [reference(tokenizer, prompt, [answer]) for answer in (BLUE, GREEN)]


def test_openrlhf_keys(tokenizer: Any) -> None:
    """`--prompt_key`, `--chosen_key` and `--rejected_key` name other columns."""
    row = {"ctx": [SKY], "good": [BLUE], "bad": [GREEN]}
    pair = build("pairs", row, tokenizer, prompt_key="ctx", chosen_key="good", rejected_key="bad")
    assert [ids(side) for side in pair] == [reference(tokenizer, [SKY], [answer]) for answer in (BLUE, GREEN)]


def trl_extract_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """TRL's `extract_prompt` for texts (trl/data_utils.py), in the words of this test."""
    last = min(len(chosen), len(rejected)) - 1
    at = next((n for n in range(last + 1) if chosen[n] != rejected[n]), None)
    start = last if at is None else at - (chosen[at - 1] == " ")
    return chosen[:start], chosen[start:], rejected[start:]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("The sky is blue.", "The sky is green."),
        ("\n\nHuman: Hi\n\nAssistant: Hello!", "\n\nHuman: Hi\n\nAssistant: No."),
        ("Yes, indeed", "Yes"),
        ("a b c", "a b d"),
    ],
)
def test_texts_without_a_prompt_are_cut_as_in_trl(chosen: str, rejected: str, tokenizer: Any) -> None:
    pair = build("pairs", {"chosen": chosen, "rejected": rejected}, tokenizer, chat_template="never")
    prompt, *answers = trl_extract_prompt(chosen, rejected)
    for side, answer in zip(pair, answers, strict=True):
        own = tokenizer(answer, add_special_tokens=False)["input_ids"]
        assert ids(side) == (tokenizer(prompt)["input_ids"], [*own, tokenizer.eos_token_id])
    with pytest.raises(DataError, match=r"row 0 .* no key 'prompt' .*; set data\.chat_template to 'never' to read"):
        build("pairs", {"chosen": chosen, "rejected": rejected}, tokenizer)


@pytest.mark.parametrize("label", [True, False, 1, 0])
@pytest.mark.parametrize("completion", [[BLUE], BLUE["content"]])
def test_unpaired_preferences_of_trl(label: Any, completion: Any, tokenizer: Any) -> None:
    prompt: Any = [SKY] if isinstance(completion, list) else SKY["content"]
    row = {"prompt": prompt, "completion": completion, "label": label}
    (sample,) = build("kto", row, tokenizer, response_key="completion")
    assert ids(sample) == reference(tokenizer, [SKY], [BLUE])
    assert sample.labels == [float(label)] * len(sample.response_ids)


def test_unpaired_preferences_of_openrlhf(tokenizer: Any) -> None:
    """A conversation whose last answer is judged; earlier answers are part of the prompt."""
    row = {"messages": [*EARLIER, SKY, BLUE], "score": 0}
    (sample,) = build("kto", row, tokenizer, messages_key="messages", label_key="score")
    assert ids(sample) == reference(tokenizer, [*EARLIER, SKY], [BLUE])
    with pytest.raises(DataError, match=r"row 0 .* ends with the user under 'messages', but its label is of an answer"):
        build("kto", {"messages": [SKY], "score": 0}, tokenizer, messages_key="messages", label_key="score")


def test_answers_of_several_turns_are_trained_where_transformers_marks_the_assistant() -> None:
    tokenizer = byte_tokenizer(MARKED)
    completion = [BLUE, say("user", "Why?"), say("assistant", "Light.")]
    (sample,) = build("sft", {"prompt": [SKY], "completion": completion}, tokenizer, response_key="completion")
    marked = tokenizer.apply_chat_template(
        [SKY, *completion], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    length = len(sample.prompt_ids) + len(sample.response_ids)
    assert sample.prompt_ids + sample.response_ids == marked["input_ids"][:length]
    assert [0] * len(sample.prompt_ids) + sample.sampled_mask == marked["assistant_masks"][:length]
    assert not any(marked["assistant_masks"][length:])


def test_a_response_that_does_not_begin_with_the_assistant_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 0 .* begins with the user under 'completion'; a response begins with the assist"):
        build("sft", {"prompt": [SKY], "completion": [SKY, BLUE]}, byte_tokenizer(), response_key="completion")


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [say("system", "Be brief."), SKY],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "... #### 72"},
}


def test_prompts_of_verl(tmp_path: Path, tokenizer: Any) -> None:
    """A parquet file, its messages a list of structs, and the answer inside `reward_model`."""
    file = tmp_path / "train.parquet"
    with_tools = {**SKY, "tool_calls": None}
    rows = [VERL, {**VERL, "data_source": "math", "prompt": [with_tools]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    source = SourceConfig(source="parquet", path=str(file))
    data = DataConfig(train=source, prompt_key="prompt", answer_key="reward_model.ground_truth")
    prompts = PromptBuilder(tokenizer, data).build(load_rows(source), prefix="train")
    for prompt, messages in zip(prompts, ([say("system", "Be brief."), SKY], [SKY]), strict=True):
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert prompt.prompt_ids == wanted
        assert MathVerify(data.answer_key).gold(prompt) == "72"
        assert prompt.row["extra_info"] == VERL["extra_info"]
    assert [find_value(prompt.row, "data_source") for prompt in prompts] == ["openai/gsm8k", "math"]
    renamed = SourceConfig(source="parquet", path=str(file), columns={"answer": "reward_model.ground_truth"})
    assert [row["answer"] for row in load_rows(renamed)] == ["72", "72"]


def test_prompts_of_easyr1_and_openrlhf(tokenizer: Any) -> None:
    wanted = tokenizer.apply_chat_template([SKY], add_generation_prompt=True, tokenize=True, return_dict=False)
    for row, key in (({"problem": SKY["content"], "answer": "72"}, "problem"), ({"input": [SKY]}, "input")):
        data = DataConfig(train=SourceConfig(), prompt_key=key)
        assert PromptBuilder(tokenizer, data).build([row], prefix="train")[0].prompt_ids == wanted


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("reward_model.ground", r"'reward_model' of data row 0 \(counted from 0\) has no key 'ground' \(data\.answer_key\)"),
        ("reward_modl.ground_truth", r"has no key 'reward_modl' .* \(did you mean 'reward_model'\?\)"),
        ("data_source.name", r"'data_source' of .* is 'openai/gsm8k', but 'data_source\.name' .* names a key in it"),
        ("answer", r"no key 'answer' \(data\.answer_key\) \(did you mean 'reward_model'\?\); it has data_source"),
    ],
)
def test_a_dotted_key_that_is_not_there(key: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        value_of(VERL, key, "data.answer_key", RowPlace(Origin("data"), 0))
    with pytest.raises(RewardError, match=r"reward 'math_verify': .*row train-7"):
        MathVerify(key).gold(Prompt("train-7", "", [1], "", VERL))
    assert find_value(VERL, key) is None


def test_a_key_with_a_dot_of_its_own_is_that_key() -> None:
    assert value_of({"a.b": 1, "a": {"b": 2}}, "a.b", "data.answer_key", "row 0") == 1


def test_a_missing_response_names_the_key_of_the_other_trainer() -> None:
    with pytest.raises(DataError, match=r"no key 'response' \(data\.response_key\) \(did you mean 'completion'\?\)"):
        build("sft", {"prompt": "q", "completion": "a"}, byte_tokenizer())


def test_inspect_knows_a_completion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "a", "label": true}\n')
    inspect(str(tmp_path / "rows.jsonl"), str(tmp_path / "model"), SupervisedSettings())
    assert "1 row as kto" in capsys.readouterr().out
