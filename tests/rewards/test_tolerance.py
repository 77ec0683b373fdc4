"""What `rewards[].on_error` makes of failures: those samples alone, counted, within the share, and never in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Sample
from megarl.errors import RewardError, RewardServerError
from megarl.rewards import RewardSources, build_rewards
from megarl.rewards.tolerance import Tolerance, metric_names
from tests.rewards.local_server import running

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))


def samples(count: int, per_group: int = 2) -> list[Sample]:
    """Samples whose responses are their numbers, of groups g0, g1, ..."""
    return [
        Sample(
            f"s{i}", f"g{i // per_group}", f"row-{i // per_group}", [1], [], [], [], [], "stop",
            response_text=str(i), row={"answer": "0", "prompt": "p", "question": "p"},
        )
        for i in range(count)
    ]  # fmt: skip


def sources(name: str, on_error: str = "zero", share: float = 1.0, **fields: Any) -> RewardSources:
    """One source, forgiven from the first step on."""
    config = RewardConfig(name=name, on_error=on_error, max_error_share=share, **{"strict_steps": 0, **fields})
    built = build_rewards([config], DATA)
    built.tolerate([config])
    return built


def forgiving(built: RewardSources) -> Tolerance:
    assert built.tolerance is not None
    return built.tolerance


def written(folder: Path, body: str) -> str:
    (folder / "own.py").write_text(f"import asyncio, math, torch\n{body}\n")
    return f"{folder / 'own.py'}:f"


FAILS = "    if x.response_text == '3': raise ValueError('three is bad')\n"
TEXT = "    if solution_str == '3': raise ValueError('three is bad')\n"
ONE_SAMPLE_FAILS = {
    "an exception": f"def f(sample):\n    x = sample\n{FAILS}    return float(x.response_text)",
    "an exception of an awaited call": "async def f(sample):\n    x = sample\n    await asyncio.sleep(0)\n"
    f"{FAILS}    return float(x.response_text)",
    "an exception of a call of verl's form": "def f(data_source, solution_str, ground_truth):\n" + TEXT + "    return "
    "float(solution_str)",
    "an exit": "def f(sample):\n    if sample.response_text == '3': raise SystemExit('three is bad')\n    return "
    "float(sample.response_text)",
    "NaN": "def f(samples):\n    return [math.nan if x.response_text == '3' else float(x.response_text) for x in samples]",
    "infinity": "def f(samples):\n    return [math.inf if x.response_text == '3' else float(x.response_text) for x in samples]",
    "None": "def f(samples):\n    return [None if x.response_text == '3' else float(x.response_text) for x in samples]",
    "a tensor of two": "def f(samples):\n    return [torch.ones(2) if x.response_text == '3' else float(x.response_text) "
    "for x in samples]",
    "a text": "def f(samples):\n    return ['3' if x.response_text == '3' else float(x.response_text) for x in samples]",
}


@pytest.mark.parametrize("body", ONE_SAMPLE_FAILS.values(), ids=ONE_SAMPLE_FAILS)
def test_a_failure_on_one_response_is_zero_for_it_and_leaves_the_others_as_they_are(tmp_path: Path, body: str) -> None:
    built, judged = sources(written(tmp_path, body)), samples(6)
    forgiving(built).begin_step(5)
    assert built.score(judged) == [0.0, 1.0, 2.0, 0.0, 4.0, 5.0]
    label = next(label for label, _, _ in built.sources)
    assert [sample.rewards[label] for sample in judged] == [0.0, 1.0, 2.0, 0.0, 4.0, 5.0]
    figures = forgiving(built).step_figures()
    assert figures == {"reward/errors": 1, "reward/errors/own.py_f": 1, "reward/errors_so_far": 1, "reward/dropped_groups": 0}
    [record] = forgiving(built).take_records()
    assert record["samples"] == ["s3"]
    assert record["errors"] == 1
    assert label in record["error"]
    assert "RewardError" in record["traceback"]


WHOLE_CALL_FAILS = {
    "an exception": "raise ValueError('three is bad')",
    "too few": "return [1.0]",
    "None": "return None",
    "a tensor of another shape": "return torch.ones(len(samples), 2)",
}


@pytest.mark.parametrize("body", WHOLE_CALL_FAILS.values(), ids=WHOLE_CALL_FAILS)
def test_a_call_over_many_responses_that_fails_fails_on_all_of_them(tmp_path: Path, body: str) -> None:
    built = sources(written(tmp_path, f"def f(samples):\n    {body}"), "drop_group")
    forgiving(built).begin_step(5)
    assert built.score(samples(6)) == [0.0] * 6
    assert forgiving(built).dropped == {"g0", "g1", "g2"}
    assert forgiving(built).step_figures()["reward/errors"] == 6


def test_the_traceback_is_the_users_own_and_stands_in_the_first_record_alone(tmp_path: Path) -> None:
    built = sources(written(tmp_path, ONE_SAMPLE_FAILS["an exception"]))
    forgiving(built).begin_step(5)
    built.score(samples(6))
    built.score(samples(6))
    first, second = forgiving(built).take_records()
    assert "in f" in first["traceback"]
    assert "ValueError: three is bad" in first["traceback"]
    assert "traceback" not in second
    assert forgiving(built).take_records() == []


def test_a_failure_drops_the_group_of_its_response_alone_and_a_new_step_drops_none(tmp_path: Path) -> None:
    built = sources(written(tmp_path, ONE_SAMPLE_FAILS["an exception"]), "drop_group")
    forgiving(built).begin_step(5)
    built.score(samples(6))
    assert forgiving(built).dropped == {"g1"}
    assert forgiving(built).step_figures()["reward/dropped_groups"] == 1
    forgiving(built).begin_step(5)  # further prompts of the same step
    assert forgiving(built).dropped == {"g1"}
    forgiving(built).begin_step(6)
    assert forgiving(built).dropped == set()


def test_a_source_that_does_not_answer_in_time_fails_on_all_responses(tmp_path: Path) -> None:
    built = sources(written(tmp_path, "import time\ndef f(samples):\n    time.sleep(60)\n    return [1.0] * len(samples)"))
    forgiving(built).begin_step(5)
    assert built.score(samples(4), deadline_s=0.2) == [0.0] * 4
    [record] = forgiving(built).take_records()
    assert "before the deadline of 0.2 s" in record["error"]


@pytest.mark.parametrize("share", [1 / 6, 1 / 7])
def test_the_run_stops_above_the_share_of_a_steps_responses(tmp_path: Path, share: float) -> None:
    built = sources(written(tmp_path, ONE_SAMPLE_FAILS["an exception"]), "drop_group", share)
    forgiving(built).begin_step(8)
    if share >= 1 / 6:
        built.score(samples(6))
        return
    with pytest.raises(RewardError, match=r"failed on 1 of 6 responses of step 9, .*max_error_share = 0\.142857.*three is bad"):
        built.score(samples(6))
    [record] = forgiving(built).take_records()
    assert "three is bad" in record["traceback"]


def test_the_share_is_of_all_responses_of_a_step_however_many_calls_judge_them(tmp_path: Path) -> None:
    built = sources(written(tmp_path, ONE_SAMPLE_FAILS["an exception"]), share=0.25)
    forgiving(built).begin_step(1)
    fourth = samples(4)
    built.score([*samples(3), *samples(3)])  # none fails
    assert built.score(fourth[3:]) == [0.0]  # 1 of 7
    assert built.score(fourth[3:]) == [0.0]  # 2 of 8
    with pytest.raises(RewardError, match="failed on 3 of 9 responses"):
        built.score(fourth[3:])


def test_the_first_steps_stop_at_the_first_failure_and_so_does_whoever_judges_outside_of_steps(tmp_path: Path) -> None:
    built = sources(written(tmp_path, ONE_SAMPLE_FAILS["an exception"]), strict_steps=2)
    with pytest.raises(RewardError, match="three is bad"):
        built.score(samples(6))
    for step in (0, 1):
        forgiving(built).begin_step(step)
        with pytest.raises(RewardError, match="three is bad"):
            built.score(samples(6))
    forgiving(built).begin_step(2)
    assert built.score(samples(6))[3] == 0.0


def test_default_is_one_strict_step_and_a_source_that_stops_does_so_beside_one_that_is_forgiven(tmp_path: Path) -> None:
    assert RewardConfig(name="x").model_dump() | {"name": ""} == {
        "name": "", "weight": 1.0, "args": {}, "on_error": "stop", "strict_steps": 1, "max_error_share": 0.1,
        "ahead": None,
    }  # fmt: skip
    name = written(tmp_path, ONE_SAMPLE_FAILS["an exception"])
    configs = [RewardConfig(name=name, on_error="zero", max_error_share=1.0), RewardConfig(name=name)]
    built = build_rewards(configs, DATA)
    built.tolerate(configs)
    forgiving(built).begin_step(5)
    with pytest.raises(RewardError, match="three is bad"):
        built.score(samples(6))
    built.tolerate([])
    plain = build_rewards(configs[1:], DATA)
    plain.tolerate(configs[1:])
    assert plain.tolerance is None


def test_an_evaluation_counts_a_failure_as_wrong_shows_it_and_drops_no_group(tmp_path: Path) -> None:
    built = sources(written(tmp_path, ONE_SAMPLE_FAILS["an exception"]), "drop_group", strict_steps=9)
    forgiving(built).begin_step(3)
    with built.evaluating() as figures:
        assert built.score(samples(6))[3] == 0.0
    assert figures == {"errors": 1}
    assert forgiving(built).dropped == set()
    assert forgiving(built).step_figures()["reward/errors_so_far"] == 0
    [record] = forgiving(built).take_records()
    assert (record["while"], record["on_error"]) == ("evaluation", "zero")
    with pytest.raises(RewardError):  # the step goes on as it was, strictly
        built.score(samples(6))


def test_an_evaluation_has_a_share_of_its_own(tmp_path: Path) -> None:
    built = sources(written(tmp_path, ONE_SAMPLE_FAILS["an exception"]), share=0.1)
    with pytest.raises(RewardError, match="failed on 1 of 6 responses of an evaluation"), built.evaluating():
        built.score(samples(6))


def test_sources_have_short_names_in_metrics_that_differ() -> None:
    assert metric_names(["http", "http#2", "/a/own.py:f", "/b/own.py:f", "/b/own.py:g"]) == {
        "http": "http",
        "http#2": "http_2",
        "/a/own.py:f": "_a_own.py_f",
        "/b/own.py:f": "_b_own.py_f",
        "/b/own.py:g": "own.py_g",
    }


def test_counts_survive_a_resume_and_the_traceback_is_not_written_again(tmp_path: Path) -> None:
    name = written(tmp_path, ONE_SAMPLE_FAILS["an exception"])
    before, after = sources(name), sources(name)
    forgiving(before).begin_step(5)
    before.score(samples(6))
    after.load_state_dict(before.state_dict())
    forgiving(after).begin_step(6)
    after.score(samples(6))
    assert forgiving(after).step_figures()["reward/errors_so_far"] == 2
    assert ["traceback" in record for record in forgiving(after).take_records()] == [False]


def application(answer: Any) -> web.Application:
    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    return app


def served(status_of: Callable[[Sequence[str]], int]) -> Any:
    """A server whose status depends on the queries; it gives each its number."""

    async def answer(request: web.Request) -> web.Response:
        queries = (await request.json())["query"]
        return web.json_response({"rewards": [float(text) for text in queries]}, status=status_of(queries))

    return running(application(answer))


def test_a_server_that_fails_on_a_request_fails_on_its_responses_alone() -> None:
    with served(lambda queries: 503 if "3" in queries else 200) as url:
        args = {"url": url, "batch_size": 2, "retries": 1, "backoff_s": 0.0}
        built = sources("http", "drop_group", args=args)
        forgiving(built).begin_step(5)
        assert built.score(samples(6, per_group=1)) == [0.0, 1.0, 0.0, 0.0, 4.0, 5.0]
    assert forgiving(built).dropped == {"g2", "g3"}
    [record] = forgiving(built).take_records()
    assert "answered status 503" in record["error"]


def test_a_server_that_is_gone_ends_the_step_as_one_for_which_a_run_restarts() -> None:
    with served(lambda queries: 503) as url:
        built = sources("http", "zero", 0.5, args={"url": url, "retries": 0})
        forgiving(built).begin_step(5)
        with pytest.raises(RewardServerError, match="failed on 4 of 4 responses of step 6"):
            built.score(samples(4))


def test_a_judge_that_fails_on_a_response_fails_on_it_alone() -> None:
    async def answer(request: web.Request) -> web.Response:
        content = (await request.json())["messages"][0]["content"]
        score = 10 * (content != "3") * (content == "1")
        return web.json_response(
            {"choices": [{"message": {"content": f"Score: {score}"}}]}, status=500 if content == "3" else 200
        )

    with running(application(answer)) as url:
        args = {"url": url, "model": "m", "template": "{response}", "retries": 0}
        built = sources("llm_judge", args=args)
        forgiving(built).begin_step(5)
        assert built.score(samples(4)) == [0.0, 1.0, 0.0, 0.0]
    assert forgiving(built).step_figures()["reward/errors"] == 1


def test_a_built_in_verifier_that_raises_on_a_response_fails_on_it_alone() -> None:
    judged = samples(4)
    for sample in judged:
        sample.rewards["environment"] = 1.0
    del judged[2].rewards["environment"]
    built = sources("environment", "drop_group")
    forgiving(built).begin_step(5)
    assert built.score(judged) == [1.0, 1.0, 0.0, 1.0]
    assert forgiving(built).dropped == {"g1"}
