"""A real run with a rank that is slowed on purpose, and with checkpoints in memory, whose bytes are those of the plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.observe.report import page_data
from megarl.observe.run_record import read_run
from megarl.options.elastic.copies_plan import copies_of
from megarl.options.elastic.memory import Memory
from megarl.options.elastic.slow_ranks import STEPS
from megarl.planning.gpus import gpu_named
from megarl.planning.plan import make_plan
from megarl.trainers.rl.train import train
from megarl.workers.roles import Roles

pytestmark = [pytest.mark.needs_option("elastic"), pytest.mark.slow]
SLEEP_S = 0.3
HEAD_BYTES = 2048
"""At most, of a tensor's head in a file."""


def slow_down(process: Any) -> None:
    """Have a rank's updates take longer from now on."""
    model = process.rank.roles["policy"]
    update = model.update

    def slowed(*arguments: Any, **named: Any) -> Any:
        time.sleep(SLEEP_S)
        return update(*arguments, **named)

    model.update = slowed


def test_a_rank_that_is_slowed_is_named_with_its_node_and_memory_takes_what_the_plan_says(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_update, calls, nodes, kept = Roles.start_update, count(), list[str](), list[tuple[int, int, int]]()
    finish = Memory.finish

    def start(roles: Roles, *arguments: Any, **named: Any) -> Any:
        if next(calls) == 0:
            group: Any = roles.groups["policy"]
            nodes.append(group.host_and_pid[1][0])
            ray.get(group.actors[1].__ray_call__.remote(slow_down))
        return start_update(roles, *arguments, **named)

    def finish_and_look(memory: Memory, deadline_s: float | None = None) -> None:
        finish(memory, deadline_s)
        whole = memory.kept
        assert whole is not None
        [node] = memory._nodes.values()
        files = sum(file.stat().st_size for file in (node.path / whole.slot).rglob("*.distcp"))
        stored = [key for written in whole.written["policy"] for key in written.keys.values()]
        tensors = sum(key.dtype.itemsize * prod(chunk.sizes) for key in stored for chunk in key.chunks)
        kept.append((tensors, files, sum(len(key.chunks) for key in stored)))

    monkeypatch.setattr(Roles, "start_update", start)
    monkeypatch.setattr(Memory, "finish", finish_and_look)
    config = tiny_config(
        **{
            "policy.layout": {"dp": 2}, "run.steps": STEPS + 3, "data.eval": None, "run.eval_before": False,
            "resources": {"spares": 0, "slow_ranks": 0.05}, "rollout.prompts_per_step": 2,
        }
    )  # fmt: skip
    train(config)
    folder = Path(config.run_folder)
    said = " ".join(capsys.readouterr().out.split())
    assert f"on {nodes[0]}) is slow: a token of update takes it" in said
    assert "warning: rank 1 of policy (process" in said
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert last["slow_ranks/number"] == 1
    assert last["slow_ranks/most_behind"] > 0.05
    rows = page_data([read_run(folder)])["runs"][0]["slow_ranks"]
    assert [(row["rank"], row["node"], row["state"]) for row in rows if row["phase"] == "update"] == [(1, nodes[0], "slow")]

    copies = copies_of(make_plan(config, gpu_named("cpu")))
    assert copies is not None
    for tensors, files, chunks in kept:
        assert tensors == copies.own
        assert copies.own < files < copies.own + chunks * HEAD_BYTES + 2**16
