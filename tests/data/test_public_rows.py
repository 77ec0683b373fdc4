"""Rows in the forms of public data sets are read by the YAML that docs/data.md gives for them, which is parsed from the page.

Contents are made here. References: the messages that each row means, rendered by transformers' `apply_chat_template`.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.source_checks import check_source
from megarl.config.sources import SourceConfig
from megarl.config.supervised import SupervisedDataConfig
from megarl.data.prompts import load_rows
from megarl.data.sample import Sample
from megarl.data.supervised import Kind, SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import PromptBuilder
from megarl.rewards import build_rewards
from tests.data.chat_tokenizers import byte_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
Message = dict[str, Any]


@dataclass
class Entry:
    """A line of the page's table."""

    name: str
    kind: str
    data: dict[str, Any]
    reward: dict[str, Any] | None


def entries() -> dict[str, Entry]:
    section = PAGE.partition("\n## Public data sets\n")[2].partition("\n## ")[0]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) >= 4 and cells[0] not in ("data set", "---") and not cells[0].startswith("---"):
            (data,) = re.findall(r"`(\{.*?\})`(?= |$)", cells[3])
            reward = re.findall(r"`(\{.*\})`", cells[4]) if len(cells) > 4 else []
            found[cells[0]] = Entry(cells[0], cells[1], yaml.safe_load(data), yaml.safe_load(reward[0]) if reward else None)
    return found


TABLE = entries()


@dataclass
class Prompts:
    """Rows of prompts: the messages that the row means, and responses that its reward pays and does not pay."""

    row: dict[str, Any]
    prompt: str | list[Message]
    right: str = ""
    wrong: str = ""


@dataclass
class Conversation:
    """A row to imitate: the messages that it means, whose assistant turns are trained on, and its tools."""

    row: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass
class Pairs:
    """Rows of preferences: of each pair the prompt, the chosen and the rejected response. Without messages it is text."""

    rows: list[dict[str, Any]]
    pairs: list[tuple[list[Message] | str, str, str]] = field(default_factory=list)


def say(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def talk(*contents: str) -> list[Message]:
    return [say(("user", "assistant")[at % 2], content) for at, content in enumerate(contents)]


def sharegpt(*turns: tuple[str, str], **more: Any) -> list[Message]:
    return [{"from": role, "value": value, **more} for role, value in turns]


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "add", "arguments": arguments}}]


ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
SCHEMA = {"type": "function", "function": ADD}
SKY, BLUE, GREEN = "What colour is the sky?", "It is blue.", "It is green."
FOUR, FIVE = "So it is \\boxed{4}.", "So it is \\boxed{5}."
DOUBLE, WRONG = "```python\nprint(2 * int(input()))\n```", "```python\nprint(4)\n```"
STDIN = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}
LETTERS = "A. red\nB. green\nC. blue\nD. grey"
COLOURS = ["red", "green", "blue", "grey"]
LABELLED = {"text": COLOURS, "label": ["A", "B", "C", "D"]}

RL = {
    "openai/gsm8k": Prompts({"question": "2+2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}, "2+2?", "It is 4", "It is 5"),
    "EleutherAI/hendrycks_math (MATH)": Prompts(
        {"problem": "2+2?", "level": "Level 1", "type": "Algebra", "solution": "We add: $2+2=\\boxed{4}$."}, "2+2?", FOUR, FIVE
    ),
    "HuggingFaceH4/MATH-500": Prompts({"problem": "2+2?", "solution": "…", "answer": "4", "level": 1}, "2+2?", FOUR, FIVE),
    "AI-MO/NuminaMath-1.5": Prompts(
        {"problem": "2+2?", "solution": "…", "answer": "\\frac{8}{2}", "source": "olympiads"}, "2+2?", FOUR, FIVE
    ),
    "agentica-org/DeepScaleR-Preview-Dataset": Prompts({"problem": "2+2?", "answer": "4", "solution": ""}, "2+2?", FOUR, FIVE),
    "SynthLabsAI/Big-Math-RL-Verified": Prompts(
        {"problem": "2+2?", "answer": "4", "source": "orca", "llama8b_solve_rate": 0.5}, "2+2?", FOUR, FIVE
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": Prompts(
        {
            "data_source": "math_dapo", "prompt": [say("user", "2+2?")], "ability": "MATH",
            "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b"},
        },
        [say("user", "2+2?")], FOUR, FIVE,
    ),
    "allenai/RLVR-GSM (Tülu)": Prompts(
        {"messages": talk("1+1?", "2", "2+2?"), "ground_truth": "4", "dataset": "gsm8k"}, talk("1+1?", "2", "2+2?"), "4", "5"
    ),
    "hiyouga/math12k (EasyR1)": Prompts({"problem": "2+2?", "answer": "4"}, "2+2?", FOUR, FIVE),
    "OpenRLHF/prompt-collection-v0.1": Prompts({"dataset": "x", "context_messages": talk(SKY)}, SKY),
    "Jiayi-Pan/Countdown-Tasks-3to4": Prompts({"target": 98, "nums": [44, 19, 35]}, "Make 98 out of 44, 19, 35."),
    "cais/mmlu": Prompts(
        {"question": SKY, "subject": "sky", "choices": COLOURS, "answer": 2}, f"{SKY}\n{LETTERS}", "Answer: C", "Answer: B"
    ),
    "TIGER-Lab/MMLU-Pro": Prompts(
        {"question_id": 7, "question": SKY, "options": COLOURS, "answer": "C", "answer_index": 2},
        f"{SKY}\n{LETTERS}", "The answer is (C)", "The answer is (B)",
    ),
    "allenai/ai2_arc": Prompts(
        {"id": "x", "question": SKY, "choices": {"text": COLOURS, "label": ["1", "2", "3", "4"]}, "answerKey": "3"},
        f"{SKY}\n{LETTERS}", "\\boxed{C}", "\\boxed{D}",
    ),
    "tau/commonsense_qa": Prompts(
        {"id": "x", "question": SKY, "question_concept": "sky", "choices": LABELLED, "answerKey": "C"},
        f"{SKY}\n{LETTERS}", "\\boxed{C}", "\\boxed{B}",
    ),
    "allenai/openbookqa": Prompts(
        {"id": "x", "question_stem": SKY, "choices": LABELLED, "answerKey": "C"}, f"{SKY}\n{LETTERS}", "\\boxed{C}", "C or not"
    ),
    "Rowan/hellaswag": Prompts(
        {"ind": 1, "ctx": "The sky is", "endings": COLOURS, "label": "2"}, f"The sky is\n{LETTERS}", "\\boxed{C}", "\\boxed{B}"
    ),
    "openlifescienceai/medmcqa": Prompts(
        {"question": SKY, "opa": "red", "opb": "green", "opc": "blue", "opd": "grey", "cop": 2, "exp": None},
        f"{SKY}\n{LETTERS}", "\\boxed{C}", "\\boxed{B}",
    ),
    "google/boolq": Prompts(
        {"question": "is the sky blue", "answer": True, "passage": "Rayleigh."}, "Rayleigh.\nis the sky blue? True or false?",
        "<answer>true</answer>", "<answer>false</answer>",
    ),
    "rajpurkar/squad": Prompts(
        {"id": "x", "context": "Blue sky.", "question": SKY, "answers": {"text": ["blue", "Blue"], "answer_start": [0, 0]}},
        f"Blue sky.\n\n{SKY}", "blue", "green",
    ),
    "mandarjoshi/trivia_qa": Prompts(
        {"question": SKY, "answer": {"value": "blue", "aliases": ["azure", "blue"]}}, SKY, "Azure", "green"
    ),
    "openai/openai_humaneval": Prompts(
        {
            "task_id": "HumanEval/0", "prompt": "def double(x):\n    ", "canonical_solution": "return 2 * x",
            "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(5) == 10\n\n",
            "entry_point": "double",
        },
        "def double(x):\n    ", "```python\ndef double(x): return 2 * x\n```", "```python\ndef double(x): return 4\n```",
    ),
    "google-research-datasets/mbpp": Prompts(
        {"task_id": 1, "text": "Double x.", "code": "…", "test_list": ["assert double(2) == 4", "assert double(5) == 10"]},
        "Double x.", "```python\ndef double(x): return 2 * x\n```", "```python\ndef double(x): return 4\n```",
    ),
    "codeparrot/apps": Prompts(
        {"question": "Double.", "input_output": json.dumps(STDIN), "difficulty": "easy"}, "Double.", DOUBLE, WRONG
    ),
    "BAAI/TACO": Prompts({"question": "Double.", "input_output": json.dumps(STDIN)}, "Double.", DOUBLE, WRONG),
    "deepmind/code_contests": Prompts(
        {"name": "x", "description": "Double.", "private_tests": {"input": STDIN["inputs"], "output": STDIN["outputs"]}},
        "Double.", DOUBLE, WRONG,
    ),
    "livecodebench/code_generation_lite": Prompts(
        {
            "question_content": "Double.",
            "public_test_cases": json.dumps([{"input": "5\n", "output": "10\n", "testtype": "stdin"}]),
        },
        "Double.", DOUBLE, WRONG,
    ),
    "princeton-nlp/SWE-bench": Prompts(
        {"repo": "a/b", "instance_id": "a__b-1", "base_commit": "f00", "patch": "diff", "problem_statement": SKY}, SKY
    ),
    "open-r1/OpenR1-Math-220k": Prompts(
        {"problem": "2+2?", "answer": "4", "generations": [FOUR, FIVE], "messages": talk("2+2?", FOUR)}, "2+2?", FOUR, FIVE
    ),
}  # fmt: skip

SFT = {
    "open-r1/OpenR1-Math-220k, its first solutions": Conversation(RL["open-r1/OpenR1-Math-220k"].row, talk("2+2?", FOUR)),
    "AI-MO/NuminaMath-CoT": Conversation(
        {"source": "x", "problem": "2+2?", "solution": FOUR, "messages": talk("2+2?", FOUR)}, talk("2+2?", FOUR)
    ),
    "tatsu-lab/alpaca": Conversation(
        {"instruction": "Translate.", "input": "Himmel", "output": "sky", "text": "…"}, talk("Translate.\nHimmel", "sky")
    ),
    "databricks/databricks-dolly-15k": Conversation(
        {"instruction": SKY, "context": "Rayleigh.", "response": BLUE, "category": "qa"}, talk(f"Rayleigh.\n\n{SKY}", BLUE)
    ),
    "GAIR/lima": Conversation({"conversations": [SKY, BLUE, "Why?", "Light."]}, talk(SKY, BLUE, "Why?", "Light.")),
    "LDJnr/Capybara": Conversation(
        {"source": "x", "conversation": [{"input": SKY, "output": BLUE}, {"input": "Why?", "output": "Light."}]},
        talk(SKY, BLUE, "Why?", "Light."),
    ),
    "Open-Orca/OpenOrca": Conversation(
        {"id": "x", "system_prompt": "Be brief.", "question": SKY, "response": BLUE},
        [say("system", "Be brief."), *talk(SKY, BLUE)],
    ),
    "Open-Orca/SlimOrca": Conversation(
        {"conversations": [
            {"from": "system", "value": "Be brief.", "weight": None}, {"from": "human", "value": SKY, "weight": 0.0},
            {"from": "gpt", "value": BLUE, "weight": 1.0},
        ]},
        [say("system", "Be brief."), *talk(SKY, BLUE)],
    ),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": Conversation(
        {"id": "x", "conversations": sharegpt(("human", SKY), ("gpt", BLUE), ("human", "Why?"), ("gpt", "Light."))},
        talk(SKY, BLUE, "Why?", "Light."),
    ),
    "allenai/tulu-3-sft-mixture": Conversation({"id": "x", "messages": talk(SKY, BLUE), "source": "y"}, talk(SKY, BLUE)),
    "HuggingFaceH4/ultrachat_200k": Conversation(
        {"prompt": SKY, "prompt_id": "x", "messages": talk(SKY, BLUE, "Why?", "Light.")}, talk(SKY, BLUE, "Why?", "Light.")
    ),
    "open-thoughts/OpenThoughts-114k": Conversation(
        {"system": "Think.", "conversations": sharegpt(("user", SKY), ("assistant", BLUE))},
        [say("system", "Think."), *talk(SKY, BLUE)],
    ),
    "simplescaling/s1K": Conversation(
        {"question": "2+2?", "solution": "4", "thinking_trajectories": ["Two and two …"], "attempt": "It is 4."},
        talk("2+2?", "<think>\nTwo and two …\n</think>\nIt is 4."),
    ),
    "meta-math/MetaMathQA": Conversation({"type": "GSM_Rephrased", "query": "2+2?", "response": FOUR}, talk("2+2?", FOUR)),
    "nvidia/OpenCodeReasoning": Conversation({"id": "x", "input": "Double.", "output": DOUBLE}, talk("Double.", DOUBLE)),
    "nvidia/HelpSteer": Conversation({"prompt": SKY, "response": BLUE, "helpfulness": 3, "verbosity": 1}, talk(SKY, BLUE)),
    "NousResearch/hermes-function-calling-v1": Conversation(
        {
            "conversations": sharegpt(
                ("system", "<tools>…</tools>"), ("human", "2+2?"), ("gpt", "<tool_call>…</tool_call>"),
                ("tool", "<tool_response>4</tool_response>"), ("gpt", "4"),
            ),
            "tools": json.dumps([SCHEMA]),
        },
        [
            say("system", "<tools>…</tools>"), *talk("2+2?", "<tool_call>…</tool_call>"),
            say("tool", "<tool_response>4</tool_response>"), say("assistant", "4"),
        ],
    ),
    "Salesforce/xlam-function-calling-60k": Conversation(
        {"id": 1, "query": "2+2?", "answers": '[{"name": "add", "arguments": {"a": 2}}]', "tools": json.dumps([ADD])},
        talk("2+2?", '[{"name": "add", "arguments": {"a": 2}}]'), [SCHEMA],
    ),
    "Salesforce/APIGen-MT-5k": Conversation(
        {
            "system": "Use tools.", "tools": json.dumps([ADD]),
            "conversations": sharegpt(
                ("human", "2+2?"), ("function_call", '{"name": "add", "arguments": {"a": 2}}'), ("observation", "4"),
                ("gpt", "4!"),
            ),
        },
        [
            say("system", "Use tools."), say("user", "2+2?"), say("assistant", "", tool_calls=call({"a": 2})), say("tool", "4"),
            say("assistant", "4!"),
        ],
        [SCHEMA],
    ),
    "Team-ACE/ToolACE": Conversation(
        {"system": "You may [add(a)].", "conversations": sharegpt(("user", "2+2?"), ("assistant", "[add(a=2)]"), ("tool", "4"),
                                                                  ("assistant", "4!"))},
        [say("system", "You may [add(a)]."), *talk("2+2?", "[add(a=2)]"), say("tool", "4"), say("assistant", "4!")],
    ),
    "OpenAI fine-tuning files": Conversation(
        {
            "messages": [
                say("user", "2+2?"),
                {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 2}'}, "content": None},
                {"role": "function", "name": "add", "content": "4"},
                say("assistant", "4!", weight=1),
            ],
            "functions": [ADD],
        },
        [
            say("user", "2+2?"), say("assistant", "", tool_calls=call({"a": 2})), say("tool", "4", name="add"),
            say("assistant", "4!"),
        ],
        [SCHEMA],
    ),
}  # fmt: skip

PROMPT_AND_SIDES = {"prompt": SKY, "chosen": talk(SKY, BLUE), "rejected": talk(SKY, GREEN)}
THE_PAIR: tuple[list[Message] | str, str, str] = (talk(SKY), BLUE, GREEN)
PAIRS = {
    "HuggingFaceH4/ultrafeedback_binarized": Pairs(
        [{**PROMPT_AND_SIDES, "messages": talk(SKY, BLUE), "score_chosen": 8.0, "score_rejected": 3.0}], [THE_PAIR]
    ),
    "Anthropic/hh-rlhf": Pairs(
        [{side: f"\n\nHuman: {SKY}\n\nAssistant: {answer}" for side, answer in (("chosen", "Blue."), ("rejected", "Green."))}],
        [(f"\n\nHuman: {SKY}\n\nAssistant:", " Blue.", " Green.")],
    ),
    "Intel/orca_dpo_pairs": Pairs(
        [{"system": system, "question": SKY, "chosen": BLUE, "rejected": GREEN} for system in ("Be brief.", "")],
        [([say("system", "Be brief."), *talk(SKY)], BLUE, GREEN), THE_PAIR],
    ),
    "argilla/dpo-mix-7k": Pairs([{"chosen": talk(SKY, BLUE), "rejected": talk(SKY, GREEN), "dataset": "x"}], [THE_PAIR]),
    "mlabonne/orpo-dpo-mix-40k": Pairs([{**PROMPT_AND_SIDES, "source": "x", "question": SKY}], [THE_PAIR]),
    "nvidia/HelpSteer2, preferences": Pairs(
        [
            {"prompt": SKY, "response_1": BLUE, "response_2": GREEN, "preference_strength": -2},
            {"prompt": SKY, "response_1": GREEN, "response_2": GREEN, "preference_strength": 0},
            {"prompt": "Why?", "response_1": "No.", "response_2": "Light.", "preference_strength": 3},
        ],
        [THE_PAIR, (talk("Why?"), "Light.", "No.")],
    ),
    "PKU-Alignment/PKU-SafeRLHF": Pairs(
        [
            {"prompt": SKY, "response_0": BLUE, "response_1": GREEN, "better_response_id": 0},
            {"prompt": "Why?", "response_0": "No.", "response_1": "Light.", "better_response_id": 1},
        ],
        [THE_PAIR, (talk("Why?"), "Light.", "No.")],
    ),
    "stanfordnlp/SHP": Pairs(
        [
            {"history": SKY, "human_ref_A": BLUE, "human_ref_B": GREEN, "labels": 1},
            {"history": "Why?", "human_ref_A": "No.", "human_ref_B": "Light.", "labels": 0},
        ],
        [THE_PAIR, (talk("Why?"), "Light.", "No.")],
    ),
}
STEPS = {"prompt": "2+2?", "completions": ["2 and 2", "makes 5"], "labels": [True, False]}
OTHERS = ("Idavidrein/gpqa", "trl-lib/kto-mix-14k", "trl-lib/math_shepherd", "trl-lib/prm800k")


def test_every_data_set_of_the_page_is_read_here() -> None:
    assert sorted(TABLE) == sorted([*RL, *SFT, *PAIRS, *OTHERS])
    assert len(TABLE) >= 60
    kinds = dict.fromkeys(RL, "RL") | dict.fromkeys(SFT, "SFT") | dict.fromkeys(PAIRS, "pairs")
    assert {name: TABLE[name].kind for name in kinds} == kinds


def written(rows: list[dict[str, Any]], folder: Path, ending: str) -> Path:
    file = folder / f"rows.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows) if ending == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    return file


def tree_of(entry: Entry, file: Path) -> dict[str, Any]:
    """The section `data` that the page gives, with the file in the place of `FILE`."""
    text = json.dumps({"train": {"path": "FILE"}} | entry.data)
    return dict(json.loads(text.replace('"FILE"', json.dumps(str(file)))))


def samples_of(entry: Entry, rows: list[dict[str, Any]], folder: Path, ending: str, kind: Kind) -> list[Sample]:
    data = SupervisedDataConfig.model_validate(tree_of(entry, written(rows, folder, ending)))
    check_source("data.train", data.train)
    read = load_rows(data.train)
    return SupervisedBuilder(TOKENIZER, kind, SupervisedSettings.of(data)).build(read, prefix="train")


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def rendered(messages: list[Message], *, ask: bool = False, tools: list[dict[str, Any]] | None = None) -> str:
    return str(TOKENIZER.apply_chat_template(messages, tools=tools, add_generation_prompt=ask, tokenize=False))


def trained_texts(sample: Sample) -> list[str]:
    """The runs of trained tokens, as text."""
    runs: list[list[int]] = [[]]
    for token, trained in zip(sample.response_ids, sample.sampled_mask, strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [text_of(run) for run in runs if run]


def paid(entry: Entry, data: DataConfig, row: dict[str, Any], *responses: str) -> list[float]:
    """The reward of each response."""
    assert entry.reward is not None
    rewards = build_rewards([RewardConfig.model_validate(entry.reward)], data)
    samples = [Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text=text, row=row) for text in responses]
    given = rewards.score(samples)
    assert rewards.failures == {}
    return given


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", RL)
def test_prompts_of_public_data_sets(name: str, ending: str, tmp_path: Path) -> None:
    case, entry = RL[name], TABLE[name]
    data = DataConfig.model_validate(tree_of(entry, written([case.row], tmp_path, ending)))
    check_source("data.train", data.train)
    (prompt,) = PromptBuilder(TOKENIZER, data).build(load_rows(data.train), prefix="train")
    messages = [say("user", case.prompt)] if isinstance(case.prompt, str) else case.prompt
    assert prompt.prompt_text == text_of(prompt.prompt_ids) == rendered(messages, ask=True)
    assert (entry.reward is not None) == bool(case.right)
    if case.right:
        assert paid(entry, data, prompt.row, case.right, case.wrong) == [1.0, 0.0]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "json"])
@pytest.mark.parametrize("name", SFT)
def test_conversations_of_public_data_sets(name: str, ending: str, tmp_path: Path) -> None:
    case = SFT[name]
    (sample,) = samples_of(TABLE[name], [case.row], tmp_path, ending, "sft")
    assert text_of(sample.prompt_ids + sample.response_ids) + "\n" == rendered(case.messages, tools=case.tools)
    answers = [at for at, message in enumerate(case.messages) if message["role"] == "assistant"]
    wanted = [
        rendered(case.messages[: at + 1], tools=case.tools)
        .removeprefix(rendered(case.messages[:at], ask=True, tools=case.tools))
        .removesuffix("\n")
        for at in answers
    ]
    assert trained_texts(sample) == wanted


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_public_data_sets(name: str, ending: str, tmp_path: Path) -> None:
    case = PAIRS[name]
    samples = samples_of(TABLE[name], case.rows, tmp_path, ending, "pairs")
    wanted = []
    for prompt, *answers in case.pairs:
        for answer in answers:
            plain = isinstance(prompt, str)
            asked = f"<s>{prompt}" if isinstance(prompt, str) else rendered(prompt, ask=True)
            wanted.append((asked, answer + ("</s>" if plain else "<|end|>")))
    assert [(text_of(sample.prompt_ids), text_of(sample.response_ids)) for sample in samples] == wanted
    assert all(all(sample.sampled_mask) for sample in samples)


def test_labelled_responses_and_steps_of_public_data_sets(tmp_path: Path) -> None:
    rows = [{"prompt": talk(SKY), "completion": [say("assistant", BLUE)], "label": label} for label in (True, False)]
    samples = samples_of(TABLE["trl-lib/kto-mix-14k"], rows, tmp_path, "parquet", "kto")
    assert [text_of(sample.prompt_ids) for sample in samples] == [rendered(talk(SKY), ask=True)] * 2
    assert [text_of(sample.response_ids) for sample in samples] == [f"{BLUE}<|end|>"] * 2
    assert [set(sample.labels) for sample in samples] == [{1.0}, {0.0}]
    for name in ("trl-lib/math_shepherd", "trl-lib/prm800k"):
        (sample,) = samples_of(TABLE[name], [STEPS], tmp_path, "parquet", "steps")
        assert text_of(sample.prompt_ids + sample.response_ids) + "\n" == rendered(talk("2+2?", "2 and 2\nmakes 5"))
        assert trained_texts(sample) == ["\n", "<|end|>"]
        assert sample.labels == [1.0, 0.0]


def test_rows_that_a_function_of_the_page_makes(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# gpqa\.py\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "gpqa.py").write_text(code)
    rows = [{"Question": SKY, "Correct Answer": "blue", **{f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)}}] * 9
    with (tmp_path / "gpqa.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    entry = TABLE["Idavidrein/gpqa"]
    tree = tree_of(entry, tmp_path / "gpqa.csv")
    tree["train"]["name"] = f"{tmp_path}/{tree['train']['name']}"
    data = DataConfig.model_validate(tree)
    prompts = PromptBuilder(TOKENIZER, data).build(load_rows(data.train), prefix="train")
    golds = [prompt.row["answer"] for prompt in prompts]
    assert len(set(golds)) > 1
    for prompt, gold in zip(prompts, golds, strict=True):
        assert f"\n{gold}. blue" in prompt.prompt_text
        assert paid(entry, data, prompt.row, f"\\boxed{{{gold}}}", "\\boxed{E}") == [1.0, 0.0]


def test_a_second_column_that_is_empty_leaves_no_line_behind(tmp_path: Path) -> None:
    for empty in ("", None, " \n"):
        row = {"instruction": "Say {hi}.", "input": empty, "output": "hi"}
        (sample,) = samples_of(TABLE["tatsu-lab/alpaca"], [row], tmp_path, "jsonl", "sft")
        assert text_of(sample.prompt_ids) == rendered(talk("Say {hi}."), ask=True)


def test_helpful_rows_alone_are_kept(tmp_path: Path) -> None:
    rows = [{"prompt": SKY, "response": BLUE, "helpfulness": helpful} for helpful in (2, 3, 4)]
    assert len(samples_of(TABLE["nvidia/HelpSteer"], rows, tmp_path, "jsonl", "sft")) == 2


def test_source_of_the_page_is_told_by_the_path() -> None:
    assert {SourceConfig(path=f"rows.{ending}").source for ending in ("json", "jsonl", "parquet")} == {"jsonl", "parquet"}
