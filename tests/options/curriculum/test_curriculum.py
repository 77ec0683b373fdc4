"""Curricula: rows come in the order of their difficulty, in stages, or not at all; a resumed order is the uninterrupted one."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import parse_any, parse_config, to_yaml
from megarl.config.sources import SourceConfig, weight_at
from megarl.data.mixture import build_parts, build_sampler, place_of_row
from megarl.data.mixture_sampler import MixtureSampler
from megarl.data.prompts import load_rows, rows_of
from megarl.data.sample import Prompt, Sample
from megarl.data.sampler import RowSampler
from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.errors import CheckpointError, ConfigError, DataError
from megarl.experience.eval_figures import pass_rates
from megarl.options.curriculum.order import Curriculum
from megarl.options.curriculum.section import CurriculumConfig
from tests.data.chat_tokenizers import byte_tokenizer

HARD = [3, 1, 2, 1, 0, 2, 5, 4, 1]


def prompts(difficulties: list[Any] = HARD, prefix: str = "train") -> list[Prompt]:
    return [Prompt(f"{prefix}-{n}", "", [n], "", {"hard": value}) for n, value in enumerate(difficulties)]


def curriculum(**fields: Any) -> CurriculumConfig:
    tree = {"model": {"path": "m"}, "data": {"train": {"name": "chain_sum"}, "curriculum": fields}}
    return parse_config(tree | {"rewards": [{"name": "exact_number"}]}).data.curriculum


def sampler(rows_per_step: int = 1, rows: list[Prompt] | None = None, seed: int = 0, **fields: Any) -> RowSampler[Prompt]:
    return RowSampler(rows or prompts(), seed, order=partial(Curriculum, curriculum(**fields)), rows_per_step=rows_per_step)


def levels(taken: list[Prompt]) -> list[int]:
    return [prompt.row["hard"] for prompt in taken]


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_rows_come_by_difficulty_and_equal_ones_are_shuffled(order: str) -> None:
    one = sampler(key="hard", order=order)
    epochs = [one.next(len(HARD)) for _ in range(3)]
    for epoch in epochs:
        assert levels(epoch) == sorted(HARD, reverse=order == "descending")
        assert len({prompt.row_id for prompt in epoch}) == len(HARD)
    ties = {tuple(p.row_id for p in epoch if p.row["hard"] == 1) for seed in range(6) for epoch in [
        sampler(key="hard", order=order, seed=seed).next(len(HARD))
    ]}  # fmt: skip
    assert len(ties) > 1


def test_after_the_ordered_epochs_rows_are_shuffled_as_without_a_curriculum() -> None:
    ordered, plain = sampler(key="hard", order="ascending", ordered_epochs=2), RowSampler(prompts(), 0)
    assert levels(ordered.next(2 * len(HARD))) == sorted(HARD) * 2
    plain.next(2 * len(HARD))
    assert ordered.next(20) == plain.next(20)


STAGES: dict[str, Any] = {"key": "hard", "stages": [{"steps": 4, "max": 1}, {"steps": 3, "min": 1, "max": 2}, {}]}


def test_stages_last_their_steps_and_have_the_rows_within_their_bounds() -> None:
    taken = sampler(rows_per_step=3, **STAGES).next(12 + 9 + 2 * len(HARD))
    easy, middle, everything = taken[:12], taken[12:21], taken[21:]
    assert Counter(levels(easy)) == {0: 3, 1: 9}  # three epochs of the rows of 0, 1, 1, 1
    assert set(levels(middle)) == {1, 2}
    assert max(Counter(p.row_id for p in middle).values()) == 2  # five rows
    assert sorted(levels(everything)) == sorted(HARD * 2)
    assert len({prompt.group_id for prompt in taken}) == len(taken)


def test_weights_are_linear_between_the_steps_given_and_constant_outside() -> None:
    weights = {10: 4.0, 0: 2.0, 20: 0.0}
    assert [weight_at(weights, step) for step in (0, 5, 10, 15, 20, 90)] == [2.0, 3.0, 4.0, 2.0, 0.0, 0.0]
    assert weight_at({7: 1.5}, 0) == 1.5


def test_the_shares_of_a_mixture_follow_its_weights_by_step() -> None:
    """Over many seeds, each step's share of the first part is the weight's."""
    parts = [prompts(prefix="train-0"), prompts(prefix="train-1")]
    weights = [{0: 3.0, 4: 1.0}, {0: 1.0, 4: 1.0, 5: 0.0, 6: 0.0, 7: 2.0}]
    counts: Counter[int] = Counter()
    seeds, each = 150, 8
    for seed in range(seeds):
        drawn = MixtureSampler(parts, weights, seed, rows_per_step=each).next(9 * each)
        for place, prompt in enumerate(drawn):
            counts[place // each] += prompt.row_id.startswith("train-0-")
    for step in range(9):
        first, second = (weight_at(one, step) for one in weights)
        share = first / (first + second)
        deviation = (share * (1 - share) / (seeds * each)) ** 0.5
        assert abs(counts[step] / (seeds * each) - share) <= 4 * deviation
    assert counts[5] == counts[6] == seeds * each


KINDS: list[dict[str, Any]] = [
    {},
    {"key": "hard", "order": "ascending", "ordered_epochs": 1},
    STAGES,
    {"min_pass_rate": 0.2, "max_pass_rate": 0.8, "pause_epochs": 2},
    STAGES | {"max_pass_rate": 0.5, "pass_rate_memory": 0.0},
]


def judged(taken: list[Prompt]) -> dict[str, float]:
    """A pass rate for each visit, as if judged."""
    return {prompt.group_id: (hash_of(prompt.group_id) % 5) / 4 for prompt in taken}


def hash_of(text: str) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.integers(0, 12), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_a_resumed_order_is_that_of_a_run_that_never_stopped(
    kind: dict[str, Any], before: int, after: int, each: int, mixed: bool
) -> None:
    kind = {} if mixed and "stages" in kind else kind

    def new() -> Any:
        parts = [prompts(prefix="train-0"), prompts(HARD[:4], prefix="train-1")] if mixed else [prompts()]
        return build_sampler(parts, [{0: 1.0, 5: 0.0}, 1.0][: len(parts)], 7, partial(Curriculum, curriculum(**kind)), each)

    def step(one: Any) -> list[Prompt]:
        taken = one.next(each)
        one.record(judged(taken))
        return list(taken)

    straight, stopped, resumed = new(), new(), new()
    expected = [step(straight) for _ in range(before + after)][before:]
    for _ in range(before):
        step(stopped)
    step(resumed)  # whatever it was before
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [step(resumed) for _ in range(after)] == expected
    assert resumed.figures()["curriculum/left_out"] == straight.figures()["curriculum/left_out"]


def test_rows_out_of_bounds_are_left_out_for_so_many_epochs_from_their_next_one_on() -> None:
    one = sampler(rows=prompts([0] * 4), min_pass_rate=0.25, max_pass_rate=0.75, pass_rate_memory=0.5, pause_epochs=2)
    rates = {"train-0": 0.0, "train-1": 0.25, "train-2": 0.75, "train-3": 1.0}
    first = one.next(4)
    one.record({prompt.group_id: rates[prompt.row_id] for prompt in first})
    assert one.figures()["curriculum/left_out"] == 0 or one.figures()["curriculum/left_out"] == 2
    for _ in range(2):
        assert {prompt.row_id for prompt in one.next(2)} == {"train-1", "train-2"}  # bounds themselves are within
    back = one.next(4)
    assert {prompt.row_id for prompt in back} == set(rates)
    assert {prompt.group_id.rpartition("@")[2] for prompt in back} == {"3"}
    # 0.5 * 0.0 + 0.5 * 0.5 = 0.25 is within the bounds; 0.5 * 1.0 + 0.5 * 0.75 = 0.875 is not
    one.record({"train-0@3": 0.5, "train-3@3": 0.75})
    assert {prompt.row_id for prompt in one.next(3)} == {"train-0", "train-1", "train-2"}
    assert one.figures()["curriculum/left_out"] == 1


def test_an_epoch_without_any_row_left_gives_one_and_the_rows_come_back() -> None:
    one = sampler(rows=prompts([0] * 3), min_pass_rate=0.5, pause_epochs=2)
    one.record({prompt.group_id: 0.0 for prompt in one.next(3)})
    epochs = [prompt.group_id.rpartition("@")[2] for prompt in one.next(5)]
    assert epochs == ["1", "2", "3", "3", "3"]


def test_pass_rates_are_the_share_of_right_responses_of_each_visit() -> None:
    def response(group: str, right: float) -> Sample:
        made = Sample("s", group, "r", [1], [2], [1], [0.0], [0], "stop")
        made.rewards = {"exact_number": right, "format_regex": 1.0, "reward_model": 0.1}
        return made

    samples = [response("a@0", 1), response("a@0", 0.5), response("b@0", 0), response("a@1", 1), response("a@0", 1)]
    assert pass_rates(samples) == {"a@0": 2 / 3, "b@0": 0.0, "a@1": 1.0}


def rows_file(folder: Path) -> SourceConfig:
    rows = [{"question": f"q{n}", "response": "r", "pass_rate": n / 4} for n in range(5)]
    lines = [json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n\n".join(lines))  # blank lines are no rows
    return SourceConfig(source="jsonl", path=str(folder / "rows.jsonl"), keep={"pass_rate": (0.25, 0.75)})


def test_rows_are_kept_within_bounds_and_have_the_numbers_that_they_have_in_the_file(tmp_path: Path) -> None:
    source = rows_file(tmp_path)
    assert [row["pass_rate"] for row in load_rows(source)] == [0.25, 0.5, 0.75]
    assert [row is None for row in rows_of(source)] == [True, False, False, False, True]
    builder = SupervisedBuilder(byte_tokenizer(), "sft", SupervisedSettings(prompt_key="question"))
    (samples,) = build_parts(builder, source, prefix="train")
    assert [sample.row_id for sample in samples] == ["train-1", "train-2", "train-3"]
    assert builder.dropped["not_kept"] == 2
    mixed = SourceConfig(source="mixture", parts=(source, source.model_copy(update={"keep": {"pass_rate": (None, 0.0)}})))
    assert [row["pass_rate"] for row in load_rows(mixed)] == [0.25, 0.5, 0.75, 0.0]
    assert [place_of_row(name, mixed).number for name in ("train-0-3", "train-1-0")] == [3, 0]
    nothing = source.model_copy(update={"keep": {"pass_rate": (2.0, None)}})
    with pytest.raises(DataError, match=r"gives no samples: of 5 rows 5 dropped as not_kept"):
        build_parts(SupervisedBuilder(byte_tokenizer(), "sft", SupervisedSettings(prompt_key="question")), nothing, prefix="x")


def test_rows_without_a_number_are_named_with_their_file_and_line(tmp_path: Path) -> None:
    source = rows_file(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        '{"hard": 1, "question": "q", "response": "r"}\n\n{"hard": "x", "question": "q", "response": "r"}'
    )
    with pytest.raises(DataError, match=r"^'.*rows\.jsonl' line 1 has no key 'pass_rate' \(keep\); it has hard, "):
        load_rows(source)
    with pytest.raises(DataError, match=r"^'.*rows\.jsonl' line 3 has 'x' under 'hard' \(keep\); it must be a number$"):
        load_rows(source.model_copy(update={"keep": {"hard": (0.0, None)}}))
    plain = source.model_copy(update={"keep": {}})
    builder = SupervisedBuilder(byte_tokenizer(), "sft", SupervisedSettings(prompt_key="question"))
    parts = build_parts(builder, plain, prefix="train")
    with pytest.raises(
        DataError, match=r"^data\.train \('.*rows\.jsonl'\) line 3 has 'x' under 'hard' \(data\.curriculum\.key\)"
    ):
        order = partial(Curriculum, curriculum(key="hard", order="ascending"))
        build_sampler(parts, [1.0], 0, order, place_of=lambda row_id: place_of_row(row_id, plain))


def test_a_stage_without_rows_and_a_checkpoint_of_another_curriculum_are_refused() -> None:
    with pytest.raises(DataError, match=r"stages\[1\] has no rows: their 'hard' is from 0 to 5, and it takes 6 to inf"):
        sampler(key="hard", stages=[{"steps": 1}, {"min": 6}])
    late = sampler(**STAGES)
    late.next(30)
    with pytest.raises(
        CheckpointError, match=r"data\.curriculum has 1 stages, and the checkpoint is in number 3; a resumed run"
    ):
        sampler().load_state_dict(late.state_dict())


def test_a_checkpoint_of_an_earlier_version_goes_on() -> None:
    old, new = RowSampler(prompts(), 0), RowSampler(prompts(), 0)
    old.next(13)
    new.load_state_dict({"position": 13, "rows": len(HARD)})
    assert new.next(20) == old.next(20)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"order": "ascending"}, r"data\.curriculum\.order needs a difficulty: set data\.curriculum\.key"),
        ({"stages": [{}]}, r"data\.curriculum\.stages needs a difficulty"),
        ({"key": "hard"}, r"data\.curriculum\.key needs data\.curriculum\.order or data\.curriculum\.stages"),
        ({"key": "hard", "stages": [{}], "ordered_epochs": 1}, r"ordered_epochs needs an order"),
        ({"key": "hard", "stages": [{}, {}]}, r"stages\[0\]\.steps is null; it must be a whole number"),
        ({"key": "hard", "stages": [{"steps": 3}]}, r"stages\[0\]\.steps is 3; it must be null for the last stage"),
        (
            {"key": "hard", "stages": [{"min": 3, "max": 2}]},
            r"stages\[0\]\.min is 3.*at most data\.curriculum\.stages\[0\]\.max",
        ),
        (
            {"min_pass_rate": 0.9, "max_pass_rate": 0.1},
            r"min_pass_rate is 0\.9; it must be at most data\.curriculum\.max_pass_rate",
        ),
        ({"pause_epochs": 3}, r"pause_epochs needs bounds of pass rates"),
        ({"min_pass_rate": 1.5}, r"min_pass_rate is 1\.5"),
    ],
)
def test_a_curriculum_that_contradicts_itself_is_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        curriculum(**fields)


PART = {"source": "jsonl", "path": "x"}
RL: dict[str, Any] = {"model": {"path": "m"}, "rewards": [{"name": "exact_number"}]}


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            RL | {"data": {"train": {"source": "mixture", "parts": [PART]}, "curriculum": {"key": "h", "stages": [{}]}}},
            r"data\.curriculum\.stages needs a single source: set weight_by_step of the parts",
        ),
        (
            RL | {"data": {"train": PART | {"weight_by_step": {0: 1}}}},
            r"data\.train\.weight_by_step is .*only the parts of a mix",
        ),
        (
            RL | {"data": {"train": {"source": "mixture", "parts": [PART | {"weight_by_step": {0: 1}, "weight": 2}]}}},
            r"parts\[0\]\.weight is 2\.0, which data\.train\.parts\[0\]\.weight_by_step replaces",
        ),
        (
            RL | {"data": {"train": {"source": "mixture", "parts": [PART | {"weight_by_step": {0: 1, 9: 0}}]}}},
            r"data\.train\.parts have no weight above 0 at step 9; one of their weight_by_step must have one",
        ),
        (
            RL | {"data": {"train": PART | {"keep": {"p": [1, 0]}}}},
            r"data\.train\.keep\.p\[0\] is 1.*at most data\.train\.keep\.p\[1\]",
        ),
        (
            RL | {"rewards": [], "reward_model": {"path": "r"}, "data": {"train": PART, "curriculum": {"min_pass_rate": 0.1}}},
            r"data\.curriculum needs functions that judge responses for its pass rates: set rewards",
        ),
        (
            {"model": {"path": "m"}, "objective": {}, "data": {"train": PART, "curriculum": {"max_pass_rate": 0.5}}},
            r"data\.curriculum\.max_pass_rate is 0\.5, which only reinforcement learning has; it must be null",
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_any(tree)


def test_a_resolved_config_reads_back(tmp_path: Path) -> None:
    import yaml

    parts = [PART | {"weight_by_step": {0: 1, 9: 2.5}, "keep": {"p": [None, 0.5]}}, PART]
    tree = RL | {"data": {"train": {"source": "mixture", "parts": parts}, "curriculum": {"key": "h", "order": "ascending"}}}
    config = parse_any(tree)
    assert parse_any(yaml.safe_load(to_yaml(config))) == config
    assert config.data.train.parts[0].weight_by_step == {0: 1.0, 9: 2.5}
