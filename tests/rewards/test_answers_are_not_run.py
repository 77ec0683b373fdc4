"""What a model answers is data: no verifier runs it, and what runs all the same can reach nothing and forge nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from reasoning_gym import create_dataset

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Sample
from megarl.errors import RewardError
from megarl.rewards import RewardSources, build_rewards
from tests.rewards.sandboxed import in_child, landlock_version

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
EVALUATE = [
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),  # eval
    *("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"),  # parse_expr
]
"""Tasks of reasoning_gym that evaluate the answer."""
ONE = b"\0\0\0\0\0\0\xf0?"
"""1.0 as a verdict travels."""


def _sample(answer: str, row: dict[str, Any]) -> Sample:
    return Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text=f"<answer>{answer}</answer>", row=row)


def _row(task: str) -> dict[str, Any]:
    entry = create_dataset(task, seed=3, size=1)[0]
    return {**entry, "data_source": task, "metadata": {**entry["metadata"], "source_dataset": task}}


@pytest.fixture(scope="module")
def rewards() -> RewardSources:
    return build_rewards([RewardConfig(name="reasoning_gym")], DATA)


ATTACKS = [
    "__import__('os').write(3, b'1.0\\n')",
    f"__import__('os').write(3, {ONE!r})",
    "__import__('os').system('touch {mark}')",
    "open('{mark}', 'w')",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "(lambda: __import__('os').system('touch {mark}'))()",
    "sympify(\"__import__('os').system('touch {mark}')\")",
    "sqrt(\"__import__('os').system('touch {mark}')\")",
    "Symbol('x').__class__.__mro__",
    "f\"{{__import__('os').system('touch {mark}')}}\"",
    "lambdify(Symbol('x'), \"__import__('os').system('touch {mark}')\")(1)",
    "[print, exit, eval][2](\"__import__('os').system('touch {mark}')\")",
    "preview(x, viewer='file', filename='{mark}')",
]


@pytest.mark.parametrize("task", EVALUATE)
def test_an_answer_that_is_a_program_is_a_wrong_answer(rewards: RewardSources, task: str, tmp_path: Path) -> None:
    row, mark = _row(task), tmp_path / "mark"
    nonsense, right = rewards.score([_sample("?", row), _sample(str(row["answer"]), row)])
    attacks = rewards.score([_sample(attack.format(mark=mark), row) for attack in ATTACKS])
    assert attacks == [nonsense] * len(ATTACKS)
    assert nonsense <= 0.05
    assert not mark.exists()
    again = rewards.score([_sample(str(row["answer"]), row), _sample("??", row)])
    assert again == [right, nonsense], "an attack changed how later answers are judged"


@pytest.mark.parametrize(
    ("task", "rewrite", "score"),
    [
        ("string_insertion", lambda answer: repr(list(answer)), 0.1),
        ("spiral_matrix", lambda answer: repr(answer.split()), 0.1),
        ("binary_matrix", lambda answer: repr([line.split() for line in answer.splitlines()]), 0.1),
        ("n_queens", lambda answer: repr([line.split() for line in answer.splitlines()]), 0.5),
        ("countdown", lambda answer: answer.replace(" ", "") + " + 0*0", 0.05),
        ("simple_integration", lambda answer: f"({answer}) + C + sin(1)**2", 1.0),
        ("intermediate_integration", lambda answer: answer.replace("**", "**").replace("+ C", "+ C + 2"), 1.0),
        ("polynomial_multiplication", lambda answer: f"0 + {answer}", 1.0),
    ],
)
def test_lists_and_formulas_are_still_evaluated(rewards: RewardSources, task: str, rewrite: Any, score: float) -> None:
    """As the task itself scores them, without any sandbox."""
    row = _row(task)
    answer = rewrite(str(row["answer"]))
    assert create_dataset(task, seed=3, size=1).score_answer(answer, row) == pytest.approx(score)
    assert rewards.score([_sample(answer, row)]) == [pytest.approx(score)]


def test_every_tasks_own_answer_keeps_its_score(rewards: RewardSources) -> None:
    """The guard refuses no answer that a task gives itself."""
    for task in EVALUATE:
        data = create_dataset(task, seed=11, size=5)
        for entry in data:
            row = {**entry, "data_source": task}
            assert rewards.score([_sample(str(entry["answer"]), row)]) == [data.score_answer(str(entry["answer"]), entry)], task


RUNS_IT = """
import vetted_eval
vetted_eval.install = lambda: None  # as if an answer had found a way around it
import judge_child
print(judge_child.judge_in_fork(lambda answer: eval(answer), {answer!r}, {timeout_s}))
print(judge_child.judge_in_fork(lambda answer: eval(answer), "0.25", 5))
"""
"""A judge that runs what it is given."""


def _run_by_a_judge(answer: str, timeout_s: float = 5) -> list[str]:
    return in_child(RUNS_IT.format(answer=answer, timeout_s=timeout_s)).split()


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').kill(__import__('os').getppid(), 9) or 1",
        "__import__('os').system('true') or 1.0",
        "__import__('subprocess').run(['true']) and 1.0",
        "__import__('socket').socket() and 1.0",
        "open('/tmp/megarl-mark', 'w') and 1.0",
        "__import__('fcntl').fcntl(3, 8, __import__('os').getppid()) or 1.0",
        "[__import__('os').write(n, b'1.0') for n in range(4, 64)] and 1.0",
    ],
)
def test_code_that_a_judge_does_run_reaches_nothing(answer: str) -> None:
    assert _run_by_a_judge(answer) == ["None", "0.25"]
    assert not Path("/tmp/megarl-mark").exists()


def test_only_the_guard_of_eval_keeps_a_verdict_from_code_that_is_run() -> None:
    """A limit: what judges an answer and what would run it share a process, so such code could say that it is right.

    The attacks above do the same with the guard in place, and are wrong answers. The next verdict is out of reach all the same.
    """
    assert _run_by_a_judge(f"__import__('os').write(3, {ONE!r}) and __import__('os')._exit(0)") == ["1.0", "0.25"]


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/{parent}/environ", "/proc/{parent}/mem", "/proc/{parent}/fd/1"])
def test_code_that_a_judge_does_run_reads_no_file_of_others(path: str) -> None:
    if not landlock_version():
        pytest.skip("this kernel has no Landlock, which keeps what runs from reading")
    assert _run_by_a_judge(f"open({path!r}.format(parent=__import__('os').getppid()), 'rb').read(1) and 1.0") == [
        "None",
        "0.25",
    ]


@pytest.mark.parametrize(
    "verdict", ["1e300", "float('nan')", "-1", "2", "'text'", "[1]", "__import__('os').write(3, b'1' * 4000) and 1"]
)
def test_a_verdict_that_is_none_is_not_taken(verdict: str) -> None:
    assert _run_by_a_judge(verdict) == ["None", "0.25"]


def test_what_one_answer_changes_is_gone_for_the_next() -> None:
    assert _run_by_a_judge("setattr(__import__('builtins'), 'float', lambda text: 1.0) or 0.5") == ["0.5", "0.25"]


def test_an_answer_without_an_end_leaves_no_process() -> None:
    started = time.monotonic()
    assert _run_by_a_judge("[0 for _ in iter(int, 1)]", timeout_s=1) == ["None", "0.25"]
    assert time.monotonic() - started < 20


def test_children_do_not_get_the_keys_of_the_run(rewards: RewardSources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_REWARD_TOKEN", "secret-of-the-run")
    fresh = build_rewards([RewardConfig(name="format_regex", args={"pattern": "a+"})], DATA)
    assert fresh.score([_sample("b", {})]) == [0.0]
    children = [child for child in psutil.Process().children() if "format_regex" in child.cmdline()]
    assert children
    assert not any("secret-of-the-run" in value for child in children for value in child.environ().values())


def test_a_fork_ends_with_the_child_that_made_it(rewards: RewardSources) -> None:
    slow = build_rewards([RewardConfig(name="format_regex", args={"pattern": "(a+)+$", "timeout_s": 60})], DATA)
    sample = Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text="a" * 40 + "b", row={})

    def ask() -> None:
        with contextlib.suppress(RewardError):  # the deadline
            slow.score([sample], 10)

    asking = threading.Thread(target=ask)
    asking.start()
    forks: list[psutil.Process] = []
    until = time.monotonic() + 30
    while not forks and time.monotonic() < until:
        pools = [child for child in psutil.Process().children() if "format_regex" in child.cmdline()]
        forks = [fork for child in pools for fork in child.children()]
        time.sleep(0.05)
    assert forks
    os.kill(forks[0].ppid(), signal.SIGKILL)
    psutil.wait_procs(forks[:1], timeout=10)
    assert not forks[0].is_running()
    asking.join(20)
