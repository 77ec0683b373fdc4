"""Ranks that are slower than their peers are named, and no others: by synthetic times, and by own work in real collectives."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.layout import Layout
from megarl.observe import read_metrics
from megarl.observe.run_state import RunState
from megarl.options.elastic import run as slow_run
from megarl.options.elastic.busy_time import PHASES, tokens_in
from megarl.options.elastic.run import SlowRanks, observe
from megarl.options.elastic.slow_ranks import STEPS, RoleWatch, Slowness, median_of_others, peers_of
from megarl.options.telemetry.prometheus import exposition
from megarl.runs.observers import RunStart
from megarl.workers.group import WorkerGroup
from tests.config.smallest import config, supervised
from tests.world import World

EIGHT = Layout(dp=8)
PROCESSES = [(f"10.0.0.{rank // 4}", 100 + rank) for rank in range(8)]


def times(step: int, noise: float = 0.01, phases: int = 1, ranks: int = 8) -> Any:
    """Seconds of a token `[ranks, phases]` of equal ranks, and of work that differs from step to step."""
    generator = np.random.default_rng(step)
    return (1 + step % 3) * (1 + noise * generator.standard_normal((ranks, phases)))


def test_the_median_of_others_is_that_of_a_list_without_the_value() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 3, 4, 7, 8):
        values = generator.integers(0, 5, count).astype(float)
        expected = [np.median(np.delete(values, place)) for place in range(count)]
        assert median_of_others(values).tolist() == expected


def test_ranks_of_other_stages_and_of_other_experts_are_no_peers() -> None:
    assert peers_of(Layout(dp=2, pp=2)) == [[0, 1], [2, 3]]
    assert peers_of(Layout(tp=2, pp=2)) == [[0, 1], [2, 3]]
    assert peers_of(Layout(pp=2)) == []
    of_experts = Layout(dp=4, ep=2)
    assert [{of_experts.coords(rank).ep for rank in ranks} for ranks in peers_of(of_experts)] == [{0}, {1}]


def test_one_slow_rank_among_eight_is_named_once_after_twenty_steps() -> None:
    watch = RoleWatch(("update",), 0.05)
    told = []
    for step in range(60):
        seconds = times(step)
        seconds[5] *= 1.08
        told += [(step, change) for change in watch.take(EIGHT, PROCESSES, seconds)]
    [(step, change)] = told
    assert step == STEPS - 1
    assert (change.rank, change.process, change.phase, change.peers, change.is_slow) == (5, PROCESSES[5], "update", 7, True)
    assert change.behind == pytest.approx(0.08, abs=0.01)
    assert watch.most_behind() == pytest.approx(0.08, abs=0.01)


@pytest.mark.parametrize(("behind", "is_named"), [(1.03, False), (1.07, True)])
def test_five_per_cent_are_the_bound(behind: float, is_named: bool) -> None:
    watch = RoleWatch(("update",), 0.05)
    for step in range(200):
        seconds = times(step)
        seconds[2] *= behind
        watch.take(EIGHT, PROCESSES, seconds)
    assert bool(watch.named) == is_named


@pytest.mark.parametrize("ranks", [2, 8])
def test_noise_of_a_per_cent_names_nobody_in_ten_thousand_steps(ranks: int) -> None:
    watch, layout = RoleWatch(PHASES, 0.05), Layout(dp=ranks)
    noise = np.random.default_rng(1).standard_normal((10_000, ranks, len(PHASES)))
    assert not [change for of_step in noise for change in watch.take(layout, PROCESSES[:ranks], 1 + 0.01 * of_step)]


def test_a_step_that_takes_one_rank_ten_times_as_long_names_nobody() -> None:
    watch = RoleWatch(("update",), 0.05)
    for step in range(100):
        seconds = times(step)
        seconds[3] *= 10 if step % 10 == 0 else 1.03  # on average it is far behind
        assert watch.take(EIGHT, PROCESSES, seconds) == []


def test_phases_are_judged_apart_and_steps_without_one_are_left_out() -> None:
    watch = RoleWatch(PHASES, 0.05)
    told = []
    for step in range(2 * STEPS):
        seconds = times(step, phases=2)
        seconds[1, 0] *= 1.2
        if step % 2:
            seconds[:, 0] = 0  # no log-probs in this step
        told += [(step, change.rank, change.phase) for change in watch.take(EIGHT, PROCESSES, seconds)]
    assert told == [(2 * STEPS - 2, 1, "forward")]


def test_a_rank_is_named_until_it_is_as_fast_as_its_peers_and_another_process_begins_anew() -> None:
    watch = RoleWatch(("update",), 0.05)

    def steps(count: int, factor: float, processes: list[tuple[str, int]]) -> list[Slowness]:
        told = []
        for step in range(count):
            seconds = times(step)
            seconds[6] *= factor
            told += watch.take(EIGHT, processes, seconds)
        return told

    assert [change.is_slow for change in steps(STEPS, 1.2, PROCESSES)] == [True]
    assert [change.is_slow for change in steps(STEPS, 1.0, PROCESSES)] == [False]
    assert [change.is_slow for change in steps(STEPS, 1.2, PROCESSES)] == [True]
    replaced = [*PROCESSES[:6], ("10.0.0.9", 900), PROCESSES[7]]
    [change] = steps(STEPS - 1, 1.2, replaced)
    assert (change.rank, change.process, change.is_slow) == (6, PROCESSES[6], False)
    assert [change.process for change in steps(1, 1.2, replaced)] == [("10.0.0.9", 900)]
    assert watch.take(Layout(dp=4), PROCESSES[:4], times(0, ranks=4)) != []
    assert not watch.named


def test_prompts_count_once_for_each_response_unless_they_are_shared() -> None:
    units = [SimpleNamespace(prompt_ids=range(5), responses=[SimpleNamespace(token_ids=range(n)) for n in (2, 3)])]
    assert tokens_in([units, units], shares_prompts=True) == 20  # type: ignore[list-item]
    assert tokens_in([units, units], shares_prompts=False) == 30  # type: ignore[list-item]


class Model:
    """A role whose passes take a time of their own and end in a collective that all ranks wait in."""

    options = SimpleNamespace(shares_prefixes=True)

    def __init__(self, own_s: float) -> None:
        self._own_s = own_s

    def forward(self, micro_batches: Any) -> float:
        return self._pass(torch.distributed.all_reduce)

    def update(self, micro_batches: Any) -> float:
        return self._pass(lambda total: torch.distributed.all_reduce(total, async_op=True).wait())

    def _pass(self, reduce: Callable[[torch.Tensor], Any]) -> float:
        began = time.perf_counter()
        time.sleep(self._own_s)
        reduce(torch.ones(4))
        return time.perf_counter() - began


def busy_and_whole(rank: int, world_size: int) -> tuple[tuple[float, ...], float, bytes]:
    from megarl.options.elastic.busy_time import seconds_of_a_token

    model: Any = Model(0.4 if rank == 1 else 0.1)
    assert seconds_of_a_token(model) == (0.0, 0.0)
    torch.distributed.barrier()
    units = [SimpleNamespace(prompt_ids=range(5), responses=[SimpleNamespace(token_ids=range(5))])]
    whole = sum(model.forward([units]) + model.update([units]) for _ in range(2))
    answer = seconds_of_a_token(model)
    assert seconds_of_a_token(model) == (0.0, 0.0)
    return answer, whole, pickle.dumps(answer)


def test_seconds_in_which_others_wait_are_the_slow_ranks_alone(world: World) -> None:
    of_ranks = world.call(busy_and_whole, size=2)
    fast, slow = ([10 * seconds for seconds in of_rank[0]] for of_rank in of_ranks)
    assert all(of_rank[1] >= 1.6 for of_rank in of_ranks), "both take as long as the slow one"
    assert fast == pytest.approx([0.1, 0.1], abs=0.08)
    assert slow == pytest.approx([0.4, 0.4], abs=0.08)


def test_a_rank_answers_with_a_number_for_each_phase(world: World) -> None:
    [(answer, _, pickled)] = world.call(busy_and_whole, size=1)
    assert len(answer) == len(PHASES)
    assert len(pickled) < 9 * len(PHASES) + 32


def group(layout: Layout) -> WorkerGroup:
    made = WorkerGroup.__new__(WorkerGroup)
    made.layout, made.host_and_pid = layout, PROCESSES[: layout.world_size]
    return made


def test_an_observer_says_writes_and_serves_who_is_slow(tmp_path: Path) -> None:
    given = config("policy.layout.dp=8", f"run.folder={tmp_path}")
    state = RunState(given)
    (tmp_path / given.run.name).mkdir()
    found = observe(given, None)  # type: ignore[arg-type]
    assert isinstance(found, SlowRanks)
    found.started(RunStart(state, None, is_continued=False, say=print))
    asked = []

    def ask(role: str, question: Any) -> list[tuple[float, ...]]:
        asked.append((role, question))
        seconds = times(len(asked), phases=2)
        seconds[5, 1] *= 1.1
        return [tuple(of_rank) for of_rank in seconds.tolist()]

    roles: Any = SimpleNamespace(groups={"policy": group(EIGHT)}, ask=ask)
    metrics = [found.recorded(step, roles) for step in range(1, STEPS + 1)]
    assert asked == [("policy", slow_run.seconds_of_a_token)] * STEPS
    assert metrics[-2] == {"slow_ranks/number": 0, "slow_ranks/most_behind": 0.0}
    assert metrics[-1]["slow_ranks/number"] == 1
    [line] = found.take_lines()
    assert line.startswith("warning: rank 5 of policy (process 105 on 10.0.0.1) is slow: a token of update takes it 10% longer")
    assert line.endswith("than the median of its 7 peers, over 20 steps, without what it waits for others")
    assert found.take_lines() == []
    [row] = read_metrics(tmp_path / given.run.name / "slow_ranks.jsonl")
    assert (row["step"], row["rank"], row["node"], row["phase"], row["state"]) == (20, 5, "10.0.0.1", "update", "slow")
    served = exposition(state.snapshot(), "")[1].decode()
    assert 'megarl_ranks_slow{group="policy",node="10.0.0.1",phase="update",rank="5",run="' in served
    found.close()
    again = observe(given, None)  # type: ignore[arg-type]
    assert isinstance(again, SlowRanks)
    again.started(RunStart(state, 10, is_continued=True, say=print))
    assert read_metrics(tmp_path / given.run.name / "slow_ranks.jsonl") == []
    again.close()


def test_nobody_is_asked_where_there_are_no_peers_or_nobody_wants_to_know() -> None:
    assert observe(config(), None) is None  # type: ignore[arg-type]
    assert observe(config("policy.layout.dp=2", "resources.slow_ranks=null"), None) is None  # type: ignore[arg-type]
    assert observe(supervised("policy.layout.dp=2"), None) is not None  # type: ignore[arg-type]
