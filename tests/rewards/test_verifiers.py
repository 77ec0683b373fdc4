"""Verifiers agree with known answers; a gold answer they cannot read is counted and never rewarded."""

from __future__ import annotations

import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym import create_dataset

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.final_answer import extract_answer
from megarl.data.prompts import load_rows
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards import RewardSources, build_rewards
from megarl.rewards.builtin.exact_number import gold_number, last_number

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))


def _sample(response: str, row: dict[str, Any], row_id: str = "train-0") -> Sample:
    return Sample("s", "g", row_id, [1], [], [], [], [], "stop", response_text=response, row=row)


QUESTIONS = [
    ("56088", "\\boxed{123 \\times 456}"),
    ("5050", "$\\sum_{i=1}^{100} i$"),
    ("120", "$5!$"),
    ("7", "What is 3+4? $3+4$"),
    ("7", "\\boxed{7=3+4}"),
    ("72", "144/2"),
    ("72", "$\\frac{144}{2}$"),
    ("4", "\\boxed{\\sqrt{16}}"),
    ("1024", "$2^{10}$"),
    ("0", "\\boxed{1-1}"),
    ("72.5", "290/4"),
    ("72.5", "$\\frac{290}{4}$"),
    ("-72.5", "\\boxed{-\\frac{290}{4}}"),
    ("72.5", "\\boxed{70\\frac{10}{4}}"),
]
"""Gold numbers, and answers that are these once somebody works them out."""
WRITTEN = [
    ("42", "\\boxed{x=42}"),
    ("42", "\\boxed{(42)}"),
    ("1000", "\\boxed{1{,}000}"),
    ("1000000", "$10^6$"),
    ("602000", "$6.02 \\times 10^{5}$"),
    ("12", "\\boxed{12\\text{ cm}}"),
    ("4", "\\boxed{4\\ \\mathrm{m/s}}"),
    ("90", "\\boxed{90^\\circ}"),
    ("12", "\\boxed{\\$12}"),
    ("72", "so it is **72**"),
    ("7", "\\boxed{3+4=7}"),
    ("1/2", "\\boxed{\\frac12}"),
    ("1/2", "\\boxed{50\\%}"),
    ("50%", "\\boxed{50\\%}"),
    ("3/2", "\\boxed{1\\frac{1}{2}}"),
    ("-0.75", "\\boxed{-\\frac{3}{4}}"),
    ("1/3", "$\\frac{1}{3} \\approx 0.333$"),
    ("72.5", "\\boxed{\\frac{290}{4} = 72.5}"),
    ("72.5", "$\\frac{145}{2}$"),
    ("1/2", "$2/4$"),
    ("\\dfrac{1}{2}", "\\boxed{\\frac{2}{4}}"),
    ("144/2", "$144/2$"),  # the row asks for no number in evaluated form
]
"""Gold answers, and ways to write these."""


@pytest.fixture(scope="module")
def math_verify() -> RewardSources:
    return build_rewards([RewardConfig(name="math_verify", args={"timeout_s": 3})], DATA)


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        ("5", "2 + 3 makes 5", 1.0),
        ("5", "5.0", 1.0),
        ("5", "5 is not it, it is 6", 0.0),
        ("5", "I do not know", 0.0),
        ("5", "", 0.0),
        (5, "= 5", 1.0),
        ("-61", "The answer is -61.", 1.0),
        ("1,234", "1234", 1.0),
        ("We have 40 + 2.\n#### 42", "so $42$", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("$\\frac{1}{2}$", "It is $\\frac{2}{4}$", 1.0),
        ("2\\pi", "$2\\pi$", 1.0),
        ("2\\pi", "$2$", 0.0),
        ("x^2+1", "$1+x^2$", 1.0),
        ("(1,2)", "\\boxed{(1,2)}", 1.0),
        ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}", 1.0),
    ],
)
def test_math_verify_compares_values(math_verify: RewardSources, gold: Any, response: str, reward: float) -> None:
    before = dict(math_verify.failures)
    sample = _sample(response, {"answer": gold})
    assert math_verify.score([sample]) == [reward]
    assert sample.rewards == {"math_verify": reward}
    assert math_verify.failures == before


@pytest.mark.parametrize("gold", ["hello", "", "  ", None, "A", "$", "$\\frac{$", "\\boxed{)(}", "$=$"])
def test_unparseable_gold_is_counted_per_row_and_never_rewarded(math_verify: RewardSources, gold: Any) -> None:
    rewards = RewardSources(math_verify.sources)
    responses = [str(gold), "5", "\\boxed{hello}", ""]
    assert rewards.score([_sample(response, {"answer": gold}, "train-7") for response in responses]) == [0.0] * 4
    assert rewards.failures == {"train-7": 4}


def test_an_answer_that_stops_the_interpreter_costs_its_time_and_nothing_else(math_verify: RewardSources) -> None:
    rewards = build_rewards([RewardConfig(name="math_verify", args={"timeout_s": 3, "allow_expressions": True})], DATA)
    responses = ["3", "$9^{9^{9^{9}}}$", "3", "4"]
    samples = [_sample(response, {"answer": "3"}, f"train-{i}") for i, response in enumerate(responses)]
    assert rewards.score(samples) == [1.0, 0.0, 1.0, 0.0]
    assert rewards.failures == {"train-1": 1}
    assert math_verify.score(samples) == [1.0, 0.0, 1.0, 0.0], "what is no number is not worked out"
    assert not math_verify.failures


def test_more_slow_answers_than_the_deadline_holds_get_0_and_end_nothing() -> None:
    rewards = build_rewards([RewardConfig(name="math_verify", args={"timeout_s": 3, "allow_expressions": True})], DATA)
    samples = [_sample(f"${base}^{{9^{{9^{{9}}}}}}$", {"answer": "3"}) for base in range(2, 14)]
    assert rewards.score(samples, deadline_s=6) == [0.0] * 12
    assert rewards.failures == {"train-0": 12}


def test_math_verify_judges_many_answers_from_any_thread(math_verify: RewardSources) -> None:
    samples = [_sample(f"so it is {i}", {"answer": str(i - i % 3)}) for i in range(60)]
    result: list[list[float]] = []
    thread = threading.Thread(target=lambda: result.append(math_verify.score(samples)))
    thread.start()
    thread.join(120)
    assert result == [[float(i % 3 == 0) for i in range(60)]]


def test_the_question_said_again_is_no_answer_unless_expressions_are_allowed(math_verify: RewardSources) -> None:
    asked = [_sample(response, {"answer": gold}) for gold, response in QUESTIONS]
    assert math_verify.score(asked) == [0.0] * len(QUESTIONS)
    anything = build_rewards([RewardConfig(name="math_verify", args={"allow_expressions": True})], DATA)
    assert anything.score(asked) == [1.0] * len(QUESTIONS)


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        (72.5, "290/4", 0.0),
        ("It is 290/4. #### 72.5", "290/4", 0.0),
        ("72.5", "145/2", 1.0),
        ("72.5", "290/4 = 72.5", 1.0),
        ("72", "144/2", 0.0),
        ("1/2", "2/4", 1.0),
        ("so #### 1/2", "2/4", 1.0),
        ("-1/2", "it is -2/4", 1.0),
        ("1/2", "3/4", 0.0),
    ],
)
def test_exact_number_takes_a_division_only_if_it_is_a_fraction(gold: Any, response: str, reward: float) -> None:
    assert build_rewards([RewardConfig(name="exact_number")], DATA).score([_sample(response, {"answer": gold})]) == [reward]


def test_ways_to_write_a_number_are_answers_and_one_that_is_near_it_is_not(math_verify: RewardSources) -> None:
    assert math_verify.score([_sample(response, {"answer": gold}) for gold, response in WRITTEN]) == [1.0] * len(WRITTEN)
    assert math_verify.score([_sample("$42 \\approx 43$", {"answer": "42"})]) == [0.0]


@pytest.mark.parametrize("name", ["math_verify", "exact_number"])
def test_missing_answer_key_is_named(name: str) -> None:
    with pytest.raises(RewardError, match=r"row train-0 has no key 'answer' \(data\.answer_key\) \(did you mean 'anser'\?\)"):
        build_rewards([RewardConfig(name=name)], DATA).score([_sample("5", {"anser": "5"})])


def test_rows_that_no_response_can_be_scored_for_are_refused_before_a_run() -> None:
    good = Prompt("train-0", "", [1], "q", {"answer": "5", "data_source": "chain_sum"})
    bad = Prompt("train-1", "", [1], "q", {"anser": "5", "data_source": "chain_summ"})
    for name, sentence in (
        ("math_verify", r"row train-1 has no key 'answer' .*did you mean 'anser'"),
        ("exact_number", r"row train-1 has no key 'answer' .*did you mean 'anser'"),
        ("reasoning_gym", r"row train-1 has data_source 'chain_summ' \(did you mean 'chain_sum'\?\)"),
    ):
        rewards = build_rewards([RewardConfig(name="textwrap:dedent"), RewardConfig(name=name)], DATA)
        rewards.check([good])
        with pytest.raises(RewardError, match=sentence):
            rewards.check([good, bad])


def test_another_answer_key_is_read() -> None:
    data = DataConfig(train=DATA.train, answer_key="gold")
    assert build_rewards([RewardConfig(name="exact_number")], data).score([_sample("5", {"gold": 5, "answer": 6})]) == [1.0]


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4))
def test_written_numbers_are_read_exactly(number: Decimal) -> None:
    for text in (f"{number:f}", f"{number:,f}", f"It costs ${number:f}." if number >= 0 else f"so {number:f}."):
        assert last_number(text) == Fraction(number)
    assert gold_number(f"reasoning 12 #### {number:,f}") == Fraction(number)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7 - 3 = 4", 4),
        ("5-3", 3),
        ("x = -3", -3),
        ("(-3)", -3),
        ("\N{MINUS SIGN}8", -8),
        ("-$5", -5),
        ("1/3", Fraction(1, 3)),
        ("7/8", Fraction(7, 8)),
        ("144/2", None),
        ("0.333", Fraction(333, 1000)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1, 2", 2),
        ("one .5", Fraction(1, 2)),
        ("The total is 42.", 42),
        ("**42**", 42),
        ("\\boxed{42}", 42),
        ("nothing", None),
        ("1/0", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_last_number_is_what_a_reader_sees(text: str, value: Fraction | int | None) -> None:
    assert last_number(text) == value


def test_exact_number_counts_gold_answers_that_are_no_number() -> None:
    rewards = build_rewards([RewardConfig(name="exact_number")], DATA)
    golds = ["12", "12 apples", "none", None, 12, 12.5, "1/0", "nan"]
    samples = [_sample("it is 12", {"answer": gold}, f"train-{i}") for i, gold in enumerate(golds)]
    assert rewards.score(samples) == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert rewards.failures == {"train-1": 1, "train-2": 1, "train-3": 1, "train-6": 1, "train-7": 1}


def test_astronomic_exponents_do_not_stop_the_run() -> None:
    rewards = build_rewards([RewardConfig(name="exact_number")], DATA)
    assert rewards.score([_sample("1e999999999999", {"answer": "1"})], deadline_s=20) == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "countdown", "simple_equations", "knights_knaves"])
def test_reasoning_gym_gives_the_tasks_own_score(task: str) -> None:
    rows = load_rows(SourceConfig(name=task, limit=5, seed=3))
    rewards = build_rewards([RewardConfig(name="reasoning_gym")], DATA)
    dataset = create_dataset(task, seed=0, size=1)
    for row in rows:
        gold = row["answer"]
        responses = [f" {gold}\n", f"I think <answer>7</answer>, no: <answer>\n{gold} </answer>.", "wrong", f"so {gold}"]
        scores = rewards.score([_sample(response, row) for response in responses])
        assert scores[:2] == [1.0, 1.0]
        assert scores[2:] == [dataset.score_answer(response, row) for response in responses[2:]]
        assert scores[2] < 1
    assert rewards.failures == {}


def test_reasoning_gym_scores_with_the_arguments_that_made_the_row() -> None:
    args = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    row = {"question": "q", "answer": "1.2", "metadata": {}, "data_source": "decimal_arithmetic"}
    data = DataConfig(
        train=SourceConfig(name="decimal_arithmetic", args=args),
        eval=SourceConfig(name="decimal_arithmetic", seed=1_000_000, limit=200),
    )
    rewards = build_rewards([RewardConfig(name="reasoning_gym")], data)
    scores = rewards.score([_sample("1.23", row, "train-0"), _sample("1.23", row, "eval-0")])
    expected = [create_dataset("decimal_arithmetic", **given, seed=0, size=1).score_answer("1.23", row) for given in (args, {})]
    assert scores == expected


def test_reasoning_gym_scores_a_mixtures_rows_with_the_arguments_of_their_part() -> None:
    args = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    row = {"question": "q", "answer": "1.2", "metadata": {}, "data_source": "decimal_arithmetic"}
    parts = (SourceConfig(name="chain_sum"), SourceConfig(name="decimal_arithmetic", args=args))
    mixture = SourceConfig(source="mixture", parts=parts)
    rewards = build_rewards([RewardConfig(name="reasoning_gym")], DataConfig(train=mixture, eval=mixture))
    scores = rewards.score([_sample("1.23", row, "train-1-0"), _sample("1.23", row, "eval-7"), _sample("1.23", row, "other-0")])
    exact, plain = (
        create_dataset("decimal_arithmetic", **given, seed=0, size=1).score_answer("1.23", row) for given in (args, {})
    )
    assert scores == [exact, exact, plain]
    assert exact != plain


def test_reasoning_gym_counts_tasks_that_fail_on_an_answer() -> None:
    rewards = build_rewards([RewardConfig(name="reasoning_gym")], DATA)
    row = load_rows(SourceConfig(name="chain_sum", limit=1))[0]
    broken = {**row}
    del broken["answer"]
    assert rewards.score([_sample("5", broken), _sample(row["answer"], row)]) == [0.0, 1.0]
    assert rewards.failures == {"train-0": 1}


# the five tasks above, and those that evaluate answers in test_answers_are_not_run.py, stand for the hundred
@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_task_scores_in_a_child_process_as_in_this_one() -> None:
    """What the children refuse to do (write files, start programs) is nothing that a task needs in order to score."""
    from reasoning_gym.factory import DATASETS

    rewards = build_rewards([RewardConfig(name="reasoning_gym", args={"timeout_s": 60})], DATA)
    samples, expected = [], []
    for task in sorted(set(DATASETS) - {"composite"}):  # composite is made of other tasks
        dataset = create_dataset(task, seed=0, size=1)
        row = {**dataset[0], "data_source": task}
        for response in (str(row["answer"]), "12", "(1 + 2) * 4"):
            samples.append(_sample(response, row, f"train-{len(samples)}"))
            try:
                expected.append(float(dataset.score_answer(extract_answer(response), row)))
            except Exception:
                expected.append(None)
    assert rewards.score(samples) == [score or 0.0 for score in expected]
    assert list(rewards.failures) == [s.row_id for s, score in zip(samples, expected, strict=True) if score is None]


def test_an_answer_that_is_a_program_does_nothing_to_the_machine(tmp_path: Path) -> None:
    """`countdown` evaluates answers as Python."""
    row = load_rows(SourceConfig(name="countdown", limit=1))[0]
    gone, kept = tmp_path / "gone", tmp_path / "kept"
    kept.write_text("1")
    responses = [
        f"__import__('os').system('touch {gone}')",
        f"__import__('pathlib').Path('{gone}').write_text('x')",
        f"__import__('pathlib').Path('{kept}').unlink()",
        f"__import__('subprocess').run(['touch', '{gone}'])",
        f"__import__('shutil').copy('{kept}', '{gone}')",
    ]
    rewards = build_rewards([RewardConfig(name="reasoning_gym")], DATA)
    assert max(rewards.score([_sample(response, row) for response in responses])) < 0.1
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_an_answer_that_stops_a_tasks_interpreter_costs_its_time_and_nothing_else() -> None:
    row = load_rows(SourceConfig(name="countdown", limit=1))[0]
    rewards = build_rewards([RewardConfig(name="reasoning_gym", args={"timeout_s": 1})], DATA)
    responses = [row["answer"], "9**9**9**9", row["answer"], "__import__('os')._exit(0)"]
    samples = [_sample(response, row, f"train-{i}") for i, response in enumerate(responses)]
    assert rewards.score(samples, deadline_s=120) == [1.0, 0.0, 1.0, 0.01]
    assert rewards.failures == {"train-1": 1}


def test_rows_of_no_task_are_refused() -> None:
    rewards = build_rewards([RewardConfig(name="reasoning_gym")], DATA)
    with pytest.raises(RewardError, match=r"data_source 'chain_summ' \(did you mean 'chain_sum'\?\)"):
        rewards.score([_sample("5", {"answer": "5", "data_source": "chain_summ"})])


def test_answer_is_the_last_tagged_text_or_everything() -> None:
    assert extract_answer(" a b \n") == "a b"
    assert extract_answer("<answer>x</answer> <answer>\n y\n</answer>") == "y"
    assert extract_answer("<answer>unclosed <answer>z</answer>") == "z"
    assert extract_answer("<answer>") == "<answer>"
