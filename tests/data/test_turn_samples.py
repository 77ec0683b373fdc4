"""Samples of a conversation's turns: together, each or the last, and turns that a weight leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import SupervisedConfig
from megarl.data.batch import Batch
from megarl.data.sampler import RowSampler
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings, units_of
from megarl.errors import ConfigError, DataError
from tests.data.chat_tokenizers import FORGETFUL, byte_tokenizer
from tests.data.family_templates import FAMILIES
from tests.data.test_turn_ends import CHAT, samples, tokenizer_of, trained_runs

THINKING = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "<think>\nwhy\n</think>\n\na1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\na2"},
]


def test_each_turn_of_a_thinking_model_is_trained_with_its_thought_behind_a_history_without(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FAMILIES["Qwen3"], tmp_path)
    first, second = samples(tokenizer, THINKING, turns="each")
    assert trained_runs(tokenizer, first) == ["<think>\nwhy\n</think>\n\na1<|im_end|>"]
    assert tokenizer.decode(second.prompt_ids + second.response_ids) == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nso\n</think>\n\na2<|im_end|>"
    )
    assert trained_runs(tokenizer, second) == ["<think>\nso\n</think>\n\na2<|im_end|>"]


def test_turns_of_a_row_share_a_prompt_so_that_what_they_begin_with_is_computed_once() -> None:
    built = samples(byte_tokenizer(), CHAT, turns="each")
    assert built[0].prompt_ids == built[1].prompt_ids
    assert built[0].group_id == built[1].group_id
    batch = Batch(built)
    (unit,) = units_of(batch, range(2), [], share_prefix=True)
    assert unit.prompt_ids.tolist() == built[0].prompt_ids
    together = samples(byte_tokenizer(), CHAT)[0]
    assert sum(sum(s.sampled_mask) for s in built) == sum(together.sampled_mask)
    assert built[1].prompt_ids + built[1].response_ids == together.prompt_ids + together.response_ids


def test_rows_are_handed_out_with_all_their_turns_and_go_on_after_a_resume() -> None:
    rows = [{"messages": CHAT[: 2 * n]} for n in (1, 2, 1)]
    builder = SupervisedBuilder(byte_tokenizer(), "sft", SupervisedSettings(turns="each"))
    built = builder.build(rows, prefix="train")
    assert [s.sample_id for s in built] == ["train-0/turn-1", "train-1/turn-1", "train-1/turn-2", "train-2/turn-1"]
    straight = RowSampler(built, 1)
    everything = [straight.next(1) for _ in range(9)]
    by_rows = [len(of_row) for of_row in everything]
    assert sorted(by_rows[:3]) == sorted(by_rows[3:6]) == [1, 1, 2]  # an epoch is every row once
    stopped, resumed = RowSampler(built, 1), RowSampler(built, 1)
    stopped.next(4)
    resumed.load_state_dict(stopped.state_dict())
    assert [resumed.next(1) for _ in range(5)] == everything[4:]


def test_a_row_with_one_turn_too_long_goes_as_a_whole() -> None:
    long = [*CHAT[:3], {"role": "assistant", "content": "x" * 99}]
    settings = SupervisedSettings(turns="each", max_tokens=90, overlong="drop")
    builder = SupervisedBuilder(byte_tokenizer(), "sft", settings)
    built = builder.build([{"messages": long}, {"messages": CHAT}], prefix="train")
    assert {sample.row_id for sample in built} == {"train-1"}
    assert builder.dropped["overlong"] == 1


def weighted(*weights: Any) -> list[dict[str, Any]]:
    turns = iter(weights)
    return [message | ({"weight": next(turns)} if message["role"] == "assistant" else {}) for message in CHAT]


@pytest.mark.parametrize("turns", ["together", "each", "last"])
def test_a_turn_of_weight_0_is_read_and_not_trained_on(turns: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer()
    (second,) = samples(tokenizer, weighted(0, 1), turns=turns)
    assert trained_runs(tokenizer, second) == ["a2<|end|>"]
    plain = samples(tokenizer, CHAT)[0]
    assert second.prompt_ids + second.response_ids == plain.prompt_ids + plain.response_ids
    (first,) = samples(tokenizer, weighted(None, 0.0), turns=turns)
    assert trained_runs(tokenizer, first) == ["a1<|end|>"]
    assert not caplog.records, "no template writes weights, and none leaves one out"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (weighted(0.5, 1), r"message 1 \(counted from 0\) has 0\.5 under 'weight'; the weight of a message must be 0 or 1"),
        (weighted(1, 2), r"message 3 .* has 2 under 'weight'"),
        (weighted(1, "1"), r"message 3 .* has '1' under 'weight'"),
        (weighted(0, 0), r"no assistant turn to train on: each of them has weight 0"),
        ([CHAT[0] | {"weight": 1}, CHAT[1]], r"message 0 .* is of the user and has weight 1"),
    ],
)
def test_a_weight_that_cannot_be_used_is_named(messages: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(DataError, match=rf"data\.train row 0 \(counted from 0\).*{sentence}"):
        samples(byte_tokenizer(), messages)


def test_the_refusal_names_the_field_of_the_section_and_only_where_there_is_one() -> None:
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "b!c"}, *CHAT[2:]]}
    builder = SupervisedBuilder(byte_tokenizer(FORGETFUL), "sft", SupervisedSettings(), field="ptx.turns")
    with pytest.raises(DataError, match=r"set ptx\.turns to 'each'"):
        builder.build([row], prefix="ptx")
    pair = {"chosen": row["messages"], "rejected": [CHAT[0], {"role": "assistant", "content": "d!c"}, *CHAT[2:]]}
    with pytest.raises(DataError, match=r"it needs a template that only appends"):
        SupervisedBuilder(byte_tokenizer(FORGETFUL), "pairs", SupervisedSettings()).build([pair], prefix="train")


@pytest.mark.parametrize("name", ["dpo", "kto", "reward_model", "process_reward_model"])
def test_losses_of_one_answer_a_row_do_not_take_turns(name: str, tmp_path: Path) -> None:
    from megarl.config import load_any

    file = tmp_path / "run.yaml"
    tree = {
        "model": {"path": str(tmp_path)},
        "objective": {"name": name},
        "data": {"train": {"source": "jsonl", "path": str(file)}, "turns": "each"},
    }
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=rf"data\.turns is 'each'.*{name}"):
        load_any(str(file), [])
    assert isinstance(load_any(str(file), ["objective.name=sft"]), SupervisedConfig)
