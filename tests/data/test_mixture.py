"""A mixture comes in the shares of its weights, skips no row of any part, and goes on after a resume as if uninterrupted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import parse_config
from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.mixture import build_parts, build_sampler, mixture_weights
from megarl.data.mixture_sampler import MixtureSampler
from megarl.data.prompts import load_rows
from megarl.data.sample import Prompt
from megarl.data.sampler import RowSampler
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import PromptBuilder
from megarl.errors import CheckpointError, ConfigError, DataError
from tests.data.chat_tokenizers import byte_tokenizer, ids_of


def _parts(*sizes: int) -> list[list[Prompt]]:
    return [[Prompt(f"train-{part}-{n}", "", [n], "") for n in range(size)] for part, size in enumerate(sizes)]


def _part_of(prompt: Prompt) -> int:
    return int(prompt.row_id.split("-")[1])


@settings(deadline=None)
@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), st.integers(0, 60), st.integers(0, 3), st.data())
def test_every_part_goes_through_its_epochs_in_the_order_it_has_alone(
    sizes: list[int], n: int, seed: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    taken = MixtureSampler(_parts(*sizes), weights, seed).next(n)
    assert len({prompt.group_id for prompt in taken}) == len(taken) == n
    for number, part in enumerate(_parts(*sizes)):
        own = [prompt for prompt in taken if _part_of(prompt) == number]
        assert own == RowSampler(part, f"{seed}/{number}").next(len(own))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(0, 30), st.integers(0, 20))
def test_resumed_order_is_the_order_of_a_run_that_never_stopped(sizes: list[int], before: int, after: int) -> None:
    weights = [1.0, 2.5, 0.3][: len(sizes)]
    expected = MixtureSampler(_parts(*sizes), weights, 5).next(before + after)[before:]
    stopped, resumed = MixtureSampler(_parts(*sizes), weights, 5), MixtureSampler(_parts(*sizes), weights, 5)
    stopped.next(before)
    resumed.next(4)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.next(after) == expected


def test_shares_converge_to_the_weights_and_the_order_follows_from_the_seed() -> None:
    weights = [3.0, 1.0, 0.5]
    orders = [[p.row_id for p in MixtureSampler(_parts(11, 3, 50), weights, seed).next(6000)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    counts = Counter(row_id.split("-")[1] for row_id in orders[0])
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = (share * (1 - share) / 6000) ** 0.5
        assert abs(counts[str(number)] / 6000 - share) < 4 * deviation


def test_one_part_is_sampled_as_a_single_source() -> None:
    (part,) = _parts(20)
    assert build_sampler([part], [7.0], 3).next(50) == RowSampler(part, 3).next(50)
    assert isinstance(build_sampler(_parts(2, 2), [1.0, 1.0], 3), MixtureSampler)
    with pytest.raises(ValueError, match="as many weights above 0"):
        build_sampler(_parts(2, 2), [1.0, 0.0], 3)


def test_a_state_of_other_data_is_refused() -> None:
    single, mixed = RowSampler(_parts(4)[0], 0), MixtureSampler(_parts(4, 5), [1, 1], 0)
    with pytest.raises(CheckpointError, match=r"data\.train is a single source, and a mixture of 2 parts in the checkpoint"):
        single.load_state_dict(mixed.state_dict())
    with pytest.raises(CheckpointError, match=r"data\.train has 2 parts, and 1 in the checkpoint"):
        mixed.load_state_dict(single.state_dict())
    with pytest.raises(CheckpointError, match=r"data\.train\.parts\[1\] has 6 rows, and 5 in the checkpoint"):
        MixtureSampler(_parts(4, 6), [1, 1], 0).load_state_dict(mixed.state_dict())


def _mixture(folder: Path, **fields: Any) -> SourceConfig:
    (folder / "a.jsonl").write_text('{"question": "a0"}\n{"question": "a1"}\n')
    (folder / "b.jsonl").write_text('{"q": "b0", "r": "x"}\n\n{"q": "b1", "r": "y"}\n{"q": "b2", "r": "z"}\n')
    parts = (
        SourceConfig(source="jsonl", path=str(folder / "a.jsonl"), weight=2.0),
        SourceConfig(source="jsonl", path=str(folder / "b.jsonl"), columns={"question": "q"}),
    )
    return SourceConfig(source="mixture", parts=parts, **fields)


def test_rows_of_a_mixture_are_those_of_its_parts_and_row_ids_say_which(tmp_path: Path) -> None:
    source = _mixture(tmp_path)
    data = DataConfig(train=source)
    prompts = build_parts(PromptBuilder(byte_tokenizer(None), data), source, prefix="train")
    assert [[p.row_id for p in part] for part in prompts] == [
        ["train-0-0", "train-0-1"], ["train-1-0", "train-1-1", "train-1-2"],
    ]  # fmt: skip
    assert [p.prompt_ids for part in prompts for p in part] == [ids_of("<s>", row["question"]) for row in load_rows(source)]
    assert mixture_weights(source) == [2.0, 1.0]
    assert [row["question"] for row in load_rows(_mixture(tmp_path, limit=1))] == ["a0", "b0"]
    alone = source.parts[0]
    assert build_parts(PromptBuilder(byte_tokenizer(None), DataConfig(train=alone)), alone, prefix="train") == [
        PromptBuilder(byte_tokenizer(None), DataConfig(train=alone)).build(load_rows(alone), prefix="train")
    ]
    assert mixture_weights(alone.model_copy(update={"weight": 1.0})) == [1.0]


def test_a_bad_row_is_named_with_its_part_and_line(tmp_path: Path) -> None:
    source = _mixture(tmp_path)
    builder = SupervisedBuilder(byte_tokenizer(None), "sft", SupervisedSettings(prompt_key="question", response_key="r"))
    with pytest.raises(DataError, match=r"data\.train\.parts\[0\] \('.*a\.jsonl'\) line 1 has no key 'r'"):
        build_parts(builder, source, prefix="train")
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write('{"question": 1}\n')
    with pytest.raises(DataError, match=r"^'.*b\.jsonl' line 5 has no key 'q' \(columns\.question\)"):
        load_rows(source)


PART = {"source": "jsonl", "path": "rows.jsonl"}


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"source": "mixture"}, r"data\.train\.source = 'mixture' needs sources to mix: set data\.train\.parts"),
        ({**PART, "parts": [PART]}, r"data\.train\.parts needs data\.train\.source = 'mixture'"),
        ({**PART, "weight": 2.0}, r"data\.train\.weight is 2\.0, which only the parts of a mixture can have"),
        (
            {"source": "mixture", "path": "x", "parts": [PART]},
            r"data\.train\.path is 'x', .* must be set in data\.train\.parts",
        ),
        ({"source": "mixture", "parts": [{"source": "mixture", "parts": [PART]}]}, r"parts\[0\]\.source is 'mixture'"),
        (
            {"source": "mixture", "parts": [PART, {"source": "dataset"}]},
            r"parts\[1\]\.source = 'dataset' needs the folder of rows, or ORG/NAME .*: set data\.train\.parts\[1\]\.path",
        ),
        ({"source": "mixture", "parts": [{**PART, "weight": 0}]}, r"data\.train\.parts\[0\]\.weight is 0; .* above 0"),
        ({"source": "mixture", "parts": [{**PART, "wieght": 1}]}, r"parts\[0\]\.wieght is not a config field .*weight"),
    ],
)
def test_a_mixture_that_contradicts_itself_is_one_sentence(train: dict[str, Any], sentence: str) -> None:
    tree = {"model": {"path": "nowhere"}, "data": {"train": train}, "rewards": [{"name": "reasoning_gym"}]}
    with pytest.raises(ConfigError, match=sentence):
        parse_config(tree)


def test_held_out_ranges_are_kept_clear_of_every_part() -> None:
    parts = [{"name": "chain_sum", "seed": 0, "limit": 10}, {"name": "chain_sum", "seed": 500, "limit": 10}]
    tree: dict[str, Any] = {
        "model": {"path": "nowhere"},
        "data": {"train": {"source": "mixture", "parts": parts}, "eval": {"name": "chain_sum", "seed": 505, "limit": 5}},
        "rewards": [{"name": "reasoning_gym"}],
    }
    with pytest.raises(
        ConfigError,
        match=r"data\.eval\.seed is 505, .* data\.train\.parts\[1\] trains on \(seeds 500 to 509\); it must be at least 510",
    ):
        parse_config(tree)
    tree["data"]["eval"]["seed"] = 510
    assert parse_config(tree).data.train.parts[1].seed == 500
