"""A run whose reward fails on a response goes on without its group, on two replicas and when resumed, and tells of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.observe.report import page_data
from megarl.observe.run_record import read_run
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")

FAILS_IN_EVERY_OTHER_STEP = '''
from pathlib import Path

COUNT = Path(__file__).with_name("count")

def reward(samples):
    """The share of digits; one response of every other step cannot be judged."""
    shares = [sum(c.isdigit() for c in s.response_text) / (len(s.response_text) or 1) for s in samples]
    if len(samples) == 16:  # others are made up before the run
        calls = len(COUNT.read_text()) if COUNT.exists() else 0
        COUNT.write_text("x" * (calls + 1))
        if calls % 2:
            shares[5] = float("nan")
    return shares
'''


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_goes_on_without_the_group_that_a_reward_failed_on(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILS_IN_EVERY_OTHER_STEP)
    rewards = [{"name": f"{tmp_path / 'own.py'}:reward", "on_error": "drop_group"}]
    settings = {"data.eval": None, "rewards": rewards, "policy.layout": {"dp": 2}, "run.save_every": 1, "run.resume": "auto"}
    folder = Path(tiny_config(**settings).run_folder)
    train(tiny_config(**settings, **{"run.steps": 3}))
    train(tiny_config(**settings, **{"run.steps": 4}))

    steps = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if row["step"]}
    shown = ("reward/errors", "reward/errors/own.py_reward", "reward/dropped_groups", "reward/errors_so_far", "rollout/samples")
    assert [[steps[step][name] for name in shown] for step in (1, 2, 3, 4)] == [
        [0, 0, 0, 0, 16], [1, 1, 1, 1, 12], [0, 0, 0, 1, 16], [1, 1, 1, 2, 12],
    ]  # fmt: skip
    samples = rows_of(folder / "samples.jsonl")
    for step, row in steps.items():
        rewards_of_step = [sample["training"]["reward"] for sample in samples if sample["step"] == step]
        assert len(rewards_of_step) == row["rollout/samples"]
        assert row["reward/mean"] == pytest.approx(sum(rewards_of_step) / len(rewards_of_step))
        assert row["policy/grad_norm"] > 0

    records = rows_of(folder / "reward_errors.jsonl")
    assert [(record["step"], record["errors"], "traceback" in record) for record in records] == [(2, 1, True), (4, 1, False)]
    dropped = {record["samples"][0].rpartition("/")[0] for record in records}
    assert not dropped & {sample["group_id"] for sample in samples if sample["step"] in (2, 4)}
    [told] = page_data([read_run(folder)])["runs"][0]["reward_errors"]
    assert (told["errors"], told["steps"], told["first step"]) == (2, 2, 2)
    assert "returned nan" in told["traceback"]
