"""A run whose trainer and engines take turns, as they do on GPUs that they share, here with engines that have no GPU: one that
is killed while the others generate has all of them begin anew, and the numbers are the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train
from megarl.workers.gpu_sharing import GpuSharing, Owner
from megarl.workers.rollouts import Rollouts
from tests.themes.e2e import slow_lent_engine

pytestmark = pytest.mark.usefixtures("local_ray")
SETTINGS: dict[str, Any] = {
    "run.steps": 2,
    "resources.placement": "colocated",
    "policy.layout": {"dp": 2},
    "rollout.engines": 2,
    "rollout.engine": f"{slow_lent_engine.__file__}:SlowEngine",
    "rollout.max_new_tokens": 6,
    "rollout.ignore_eos": True,
    "rollout.threads": 1,
}
EXACT = ("policy/grad_norm", "policy/loss", "reward/mean", "mismatch/log_prob_max")


def curve(config: Config) -> list[list[float]]:
    return [[row[name] for name in EXACT if name in row] for row in read_metrics(Path(config.run_folder) / "metrics.jsonl")]


def evaluated(config: Config) -> list[Any]:
    """Rewards of every evaluation."""
    rows = read_metrics(Path(config.run_folder) / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name.startswith("eval/") and name != "eval/seconds"} for row in rows]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Owner | None, Owner]]:
    """Moves of the turns, which runs on CPUs take too."""
    found: list[tuple[Owner | None, Owner]] = []
    move = GpuSharing._move

    def moved(sharing: GpuSharing, to: Owner, ways: tuple[Owner, ...]) -> None:
        found.append((sharing.now, to))
        move(sharing, to, ways)

    monkeypatch.setattr(GpuSharing, "_move", moved)
    for module in ("rollouts", "gpu_sharing"):
        monkeypatch.setattr(f"megarl.workers.{module}.takes_turns", lambda config, platform: True)
    return found


def pid_of(engine: Any) -> int:
    """The process of an engine."""
    pid: int = ray.get(engine.__ray_call__.remote(lambda actor: os.getpid()))
    return pid


@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["samples", "evaluation"])
def test_an_engine_that_is_killed_while_others_generate_has_all_begin_anew(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, moves: list[tuple[Owner | None, Owner]], asked: bool
) -> None:
    settings = SETTINGS | ({"run.eval_every": 1} if asked else {"data.eval": None})
    config = tiny_config(**settings, **{"run.name": "calm"})
    train(config)
    calm, expected = moves.copy(), (curve(config), evaluated(config))
    assert calm[:4] == [
        (Owner.SHARED, Owner.TRAINING),
        (Owner.TRAINING, Owner.UPDATING),
        (Owner.UPDATING, Owner.GENERATING),
        (Owner.GENERATING, Owner.TRAINING),
    ]
    assert (Owner.GENERATING, Owner.UPDATING) not in calm
    moves.clear()
    wait, update, calls, held = Rollouts._wait, GpuSharing.update, count(1), list[int]()

    def kill_and_wait(rollouts: Rollouts, answers: Any = None, version: int | None = None) -> None:
        """One engine is held back until the other, which is killed, is there again: what is waited for needs both."""
        if (answers is not None) == asked and next(calls) == 2:
            held[:], lost = [pid_of(rollouts.engines[0])], pid_of(rollouts.engines[1])
            os.kill(held[0], signal.SIGSTOP)
            os.kill(lost, signal.SIGKILL)
        wait(rollouts, answers, version)

    def release_and_update(sharing: GpuSharing) -> None:
        for pid in held:
            os.kill(pid, signal.SIGCONT)
        update(sharing)

    monkeypatch.setattr(Rollouts, "_wait", kill_and_wait)
    monkeypatch.setattr(GpuSharing, "update", release_and_update)
    config = tiny_config(**settings, **{"run.name": "killed"})
    train(config)
    assert (Owner.GENERATING, Owner.UPDATING) in moves
    assert (curve(config), evaluated(config)) == expected
