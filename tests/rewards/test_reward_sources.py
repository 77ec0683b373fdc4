"""Sources add up with their weights, and a source that fails is an error that names it, never a reward."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError, RewardServerError
from megarl.rewards import RewardSources, build_rewards
from megarl.rewards.trial import try_sources
from tests.rewards.local_server import running

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))


def _samples(count: int) -> list[Sample]:
    return [
        Sample(f"s{i}", f"g{i}", f"train-{i}", [1], [], [], [], [], "stop", response_text=str(i), row={"answer": "0"})
        for i in range(count)
    ]


def _function(folder: Path, body: str, **args: Any) -> RewardSources:
    file = folder / "mine.py"
    file.write_text(body)
    return build_rewards([RewardConfig(name=f"{file}:f", args=args)], DATA)


def test_reward_is_the_weighted_sum_and_parts_stay_on_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(samples, scale): return [scale * int(s.response_text) for s in samples]\n")
    settings = [
        RewardConfig(name=f"{file}:f", weight=0.5, args={"scale": 3}),
        RewardConfig(name="exact_number", weight=-2.0),
        RewardConfig(name=f"{file}:f", args={"scale": 10}),
    ]
    samples = _samples(3)
    assert build_rewards(settings, DATA).score(samples) == [-2.0, 11.5, 23.0]
    assert samples[0].rewards == {f"{file}:f": 0.0, "exact_number": 1.0, f"{file}:f#2": 0.0}
    assert samples[2].rewards == {f"{file}:f": 6.0, "exact_number": 0.0, f"{file}:f#2": 20.0}


@pytest.mark.parametrize(
    "body",
    [
        "def f(samples): return [float(s.response_text) for s in samples]",
        "def f(sample): return int(sample.response_text)",
        "async def f(samples): return tuple(float(s.response_text) for s in samples)",
        "import asyncio\nasync def f(sample):\n    await asyncio.sleep(0.01 * (5 - int(sample.response_text)))\n"
        "    return float(sample.response_text)",
        "import asyncio\nasync def g(s): return float(s.response_text)\ndef f(sample): return asyncio.run(g(sample))",
        "import numpy\ndef f(samples): return numpy.array([float(s.response_text) for s in samples], dtype='float32')",
        "import torch\ndef f(sample): return torch.tensor(float(sample.response_text))",
    ],
)
def test_every_form_of_function_scores_in_the_order_of_the_samples(tmp_path: Path, body: str) -> None:
    assert _function(tmp_path, body).score(_samples(4)) == [0.0, 1.0, 2.0, 3.0]


def test_single_may_be_said_instead_of_guessed(tmp_path: Path) -> None:
    assert _function(tmp_path, "def f(x, *, k): return k", single=True, k=2).score(_samples(3)) == [2.0] * 3


def test_async_calls_of_single_samples_run_at_the_same_time(tmp_path: Path) -> None:
    body = "import asyncio\nasync def f(sample):\n    await asyncio.sleep(0.2)\n    return 1\n"
    started = time.monotonic()
    assert _function(tmp_path, body).score(_samples(50)) == [1.0] * 50
    assert time.monotonic() - started < 5  # one after another would take 10 s


def test_installed_functions_are_found_by_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_own_rewards.py").write_text("def half(sample): return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    assert build_rewards([RewardConfig(name="my_own_rewards:half")], DATA).score(_samples(1)) == [0.5]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def f(samples):\n    raise KeyError('gold')", r"mine\.py:f' raised KeyError: 'gold' \(.*mine\.py line 2\)"),
        ("def f(samples): return [1.0]", r"mine\.py:f' returned 1 rewards for 3 samples"),
        ("def f(samples): return 1.0", r"mine\.py:f' returned 1\.0 \(float\); it must return a list of 3 numbers"),
        ("def f(samples): return None", r"returned None \(NoneType\)"),
        ("def f(samples): return {0: 1, 1: 2, 2: 3}", r"returned \{0: 1.* \(dict\)"),
        ("def f(samples): return [1, 'good', 2]", r"returned 'good' \(str\) for sample s1, but a reward must be a finite"),
        ("def f(samples): return [1, None, 2]", r"returned None \(NoneType\) for sample s1"),
        ("def f(samples): return [1, 2, float('nan')]", r"returned nan \(float\) for sample s2"),
        ("def f(sample): return float('-inf')", r"returned -inf \(float\) for sample s0"),
        ("import numpy\ndef f(samples): return numpy.zeros((3, 1))", r"returned \[0\.0\] \(list\) for sample s0"),
        ("async def f(sample): raise ValueError('late')", r"raised ValueError: late"),
        ("def f(samples): return [0, 10**400, 0]", r"returned 1000.* \(int\) for sample s1"),
        ("def f(samples): raise SystemExit(3)", r"mine\.py:f' raised SystemExit: 3"),
    ],
)
def test_bad_answers_name_the_function_and_what_it_returned(tmp_path: Path, body: str, sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        _function(tmp_path, body).score(_samples(3))


ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1?", "data_source": "gsm8k", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 7}},
    {"prompt": "2+2?", "data_source": "math", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 8}},
]
FOREIGN = {
    "verl": """
def f(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    score = {("gsm8k", "2", 7): 1.0, ("math", "4", 8): 2.0}[data_source, ground_truth, extra_info["index"]]
    return {"score": score + (solution_str == ground_truth) * 10 + bonus, "acc": True}
""",
    "verl without extra_info": """
def f(data_source, solution_str, ground_truth, bonus=0.0):
    return {"gsm8k": 1.0, "math": 2.0}[data_source] + (solution_str == ground_truth) * 10 + bonus
""",
    "verl in batches": """
def f(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    return [info["index"] - 6 + 10 * (s == g) + bonus for s, g, info in zip(solution_strs, ground_truths, extra_infos)]
""",
    "TRL": """
def f(prompts, completions, data_source, bonus=0.0, **kwargs):
    assert prompts == ["1+1?", "2+2?"] and [one["index"] for one in kwargs["extra_info"]] == [7, 8]
    return [{"gsm8k": 1.0, "math": 2.0}[d] + 10 * (c == "2") + bonus for c, d in zip(completions, data_source)]
""",
    "TRL, async, completions alone": """
async def f(completions, bonus=0.0, **kwargs):
    return [i + 1 + 10 * (c == "2") + bonus for i, c in enumerate(completions)]
""",
    "OpenRLHF": """
import torch
def f(queries, prompts, labels, bonus=0.0):
    responses = [q[len(p):] for q, p in zip(queries, prompts)]
    assert prompts == ["<user>1+1?", "<user>2+2?"]
    rewards = torch.tensor([i + 1 + 10.0 * (r == l) + bonus for i, (r, l) in enumerate(zip(responses, labels))])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
""",
}


@pytest.mark.parametrize("form", FOREIGN)
def test_functions_of_other_trainers_are_called_as_these_call_them(tmp_path: Path, form: str) -> None:
    (tmp_path / "mine.py").write_text(FOREIGN[form])
    data = DATA.model_copy(update={"prompt_key": "prompt", "answer_key": "reward_model.ground_truth"})
    samples = [
        Sample(f"s{i}", "g", f"r{i}", [1], [], [], [], [], "stop", f"<user>{row['prompt']}", text, row=row)
        for i, (row, text) in enumerate(zip(ROWS, ["2", "5"], strict=True))
    ]
    for args, bonus in (({}, 0.0), ({"bonus": 0.5}, 0.5)):
        settings = [RewardConfig(name=f"{tmp_path}/mine.py:f", args=args)]
        assert build_rewards(settings, data).score(samples) == [11.0 + bonus, 2.0 + bonus]


def test_trl_functions_get_messages_where_prompts_are_messages(tmp_path: Path) -> None:
    rewards = _function(
        tmp_path, "def f(completions, **_): return [len(c[0]['content']) + (c[0]['role'] == 'assistant') for c in completions]"
    )
    row = {"question": [{"role": "user", "content": "1+1?"}]}
    assert rewards.score([Sample("s", "g", "r", [1], [], [], [], [], "stop", response_text="two", row=row)]) == [4.0]


def test_functions_are_tried_on_made_up_responses_before_a_run(tmp_path: Path) -> None:
    prompt = Prompt("train-0", "g", [1, 2], "1+1?", {"answer": "2"})
    counted = (
        "import pathlib\ndef f(samples):\n    assert [s.response_text for s in samples] == ['2', '2']\n    return [0.0, 1.0]"
    )
    try_sources(_function(tmp_path, counted), [prompt])
    for body, sentence in {
        "def f(sample): return sample.answer": "'Sample' object has no attribute 'answer' .* a Sample has response_text",
        "def f(samples): return [1.0]": "returned 1 rewards for 2 samples",
    }.items():
        with pytest.raises(RewardError, match=sentence + ".*; asked before the run about made-up responses to row train-0"):
            try_sources(_function(tmp_path, body), [prompt])
        try_sources(_function(tmp_path, body), [prompt], functions=False)  # as where episodes have turns
    try_sources(build_rewards([RewardConfig(name="exact_number")], DATA), [Prompt("r", "g", [], "")])  # megarl's own are not


def test_a_row_without_a_key_that_a_function_reads_is_found_before_the_run(tmp_path: Path) -> None:
    """Rows with other keys than the first are tried as well; a function of megarl's form says nothing of what it reads."""
    rows = [{"question": "q", "answer": "2"}] * 3 + [{"question": "q"}] + [{"question": "q", "level": 1}]
    prompts = [Prompt(f"train-{number}", "g", [1], "q", row) for number, row in enumerate(rows)]
    for body in (
        "def f(sample): return float(sample.row['answer'])",
        "def f(samples): return [len(s.row['answer']) for s in samples]",
    ):
        sentence = (
            r"mine\.py:f' raised KeyError: 'answer' \(.*mine\.py line 1\); row train-3 has no key 'answer', it has question; "
            "asked before the run about made-up responses to row train-3"
        )
        with pytest.raises(RewardError, match=sentence):
            try_sources(_function(tmp_path, body), prompts)
    counting = (
        "import pathlib\ndef f(samples):\n    open(__file__ + '.asked', 'a').write(samples[0].row_id + ' ')\n    return [0, 0]"
    )
    try_sources(_function(tmp_path, counting), prompts)
    assert (tmp_path / "mine.py.asked").read_text() == "train-0 train-3 train-4 "


def test_a_function_that_fails_on_one_of_many_rows_is_told_with_it(tmp_path: Path) -> None:
    rewards = _function(tmp_path, "def f(sample): return 1 / (3 - int(sample.response_text))")
    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: .*; it judged a response to row train-3$"):
        rewards.score(_samples(5))


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ("def f(completions, gold, **_): return [0.0] * len(completions)", "gold"),
        ("def f(prompts, completions, answer, gold): return [0.0] * len(completions)", "gold"),
        ("def f(solution_str, ground_truth): return 0.0", "answer"),
        ("def f(solution_strs, ground_truths): return [0.0] * len(solution_strs)", "answer"),
    ],
)
def test_a_column_that_a_function_of_another_trainer_names_must_be_in_every_row(tmp_path: Path, body: str, asked: str) -> None:
    rewards = _function(tmp_path, body)
    whole = {"question": "q", "answer": "2", "gold": "3"}
    rewards.check([Prompt("train-0", "g", [1], "q", whole)])
    lacking = {key: value for key, value in whole.items() if key != asked}
    sentence = rf"mine\.py:f' asks for '{asked}', but row train-7 has no such key; it has {', '.join(lacking)}; rename a column"
    with pytest.raises(RewardError, match=sentence):
        rewards.check([Prompt("train-7", "g", [1], "q", lacking)])
    optional = body.replace("gold,", "gold=None,").replace("gold)", "gold=None)").replace("ground_truth)", "ground_truth=None)")
    _function(tmp_path, optional.replace("ground_truths)", "ground_truths=None)")).check([Prompt("r", "g", [1], "q", lacking)])


@pytest.mark.parametrize("functions", [True, False])
def test_servers_of_rewards_are_asked_once_before_a_run_and_judges_are_not(functions: bool) -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"rewards": [1.0]} if len(asked) == 1 else {"scores": [1.0]})

    app = web.Application()
    app.add_routes([web.post("/", answer)])
    prompt = Prompt("train-0", "g", [1, 2], "1+1?", {"answer": "2"})
    args = {"retries": 0, "timeout_s": 5.0}
    with running(app) as url:
        rewards = build_rewards([RewardConfig(name="http", args={"url": url, **args})], DATA)
        try_sources(rewards, [prompt], functions=functions)
        assert asked == [{"query": ["1+1?2"], "prompts": ["1+1?"], "labels": ["2"]}]
        with pytest.raises(RewardError, match=r"no list of 'rewards'; asked before the run about a made-up response to row tr"):
            try_sources(rewards, [prompt], functions=functions)
    with pytest.raises(RewardError, match=rf"'http'.*{url}.*; asked before the run about a made-up response to row train-0"):
        try_sources(rewards, [prompt], functions=functions)  # nobody listens any more
    judge = {"url": url, "model": "m"}
    try_sources(build_rewards([RewardConfig(name="llm_judge", args=judge)], DATA), [prompt])


@pytest.mark.parametrize("of_run", [True, False])
def test_deadline_names_the_source_that_missed_it(tmp_path: Path, of_run: bool) -> None:
    release = threading.Event()
    rewards = _function(tmp_path, "def f(samples, release):\n    release.wait(60)\n    return [0.0]", release=release)
    if of_run:
        rewards.deadline_s = 0.2
    started = time.monotonic()
    late = r"mine\.py:f' did not score 2 samples before the deadline of 0\.2 s .*rollout\.deadlines\.reward_s"
    with pytest.raises(RewardError, match=late):
        rewards.score(_samples(2), None if of_run else 0.2)
    assert time.monotonic() - started < 10
    release.set()


def test_a_function_that_cannot_reach_its_server_may_say_so(tmp_path: Path) -> None:
    """Runs are restarted then; any other error ends them."""
    body = "from megarl.errors import RewardServerError\ndef f(sample): raise RewardServerError('no answer from judge:8000')"
    with pytest.raises(RewardServerError, match=r"mine\.py:f' raised RewardServerError: no answer from judge:8000"):
        _function(tmp_path, body).score(_samples(1))
    with pytest.raises(RewardError) as other:
        _function(tmp_path, "def f(sample): raise ConnectionError('gone')").score(_samples(1))
    assert not isinstance(other.value, RewardServerError)


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("math_verfy", {}, r"no reward 'math_verfy' \(did you mean 'math_verify'\?\)"),
        ("exact_number", {"strict": True}, r"'exact_number' does not take the arguments \{'strict': True\}"),
        ("no_such_module_here:f", {}, "cannot be imported: ModuleNotFoundError"),
        ("json:dumpz", {}, r"json has no function 'dumpz' \(did you mean 'dump'\?\)"),
        ("gone/mine.py:f", {}, r"there is no file gone/mine\.py"),
        (":f", {}, "names no function"),
        ("textwrap:dedent", {"width": 3}, r"'textwrap:dedent' does not take the arguments \{'width': 3\}"),
    ],
)
def test_unusable_names_and_arguments_are_refused_before_the_run(name: str, args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        build_rewards([RewardConfig(name=name, args=args)], DATA)


def test_a_file_that_does_not_compile_is_named(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"mine\.py cannot be imported: SyntaxError"):
        _function(tmp_path, "def f(:\n")


def test_scorer_that_gives_no_number_is_an_error() -> None:
    def infinite(samples: Any, until: float) -> list[float]:
        return [float("inf")] * len(samples)

    with pytest.raises(RewardError, match="'broken' gave inf to sample s0"):
        RewardSources([("broken", 1.0, infinite)]).score(_samples(2))


def test_no_samples_and_no_sources_are_no_rewards() -> None:
    assert build_rewards([], DATA).score(_samples(2)) == [0.0, 0.0]
    assert build_rewards([RewardConfig(name="exact_number")], DATA).score([]) == []
