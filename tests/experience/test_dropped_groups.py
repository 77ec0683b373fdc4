"""A step from which `on_error: drop_group` left a group out computes the numbers of a step that never had it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config import Config
from megarl.core.steps import RlRun
from megarl.data.batch import Batch
from megarl.data.branches import JoinedEpisodes
from megarl.data.micro_batches import plan_micro_batches
from megarl.data.sample import Sample
from megarl.errors import RewardError
from megarl.experience.experience import Experience, mini_batch_rows, set_loss_weights
from megarl.experience.inputs import RlInputs
from megarl.observe import Phases
from megarl.rewards import build_rewards
from tests.config import smallest
from tests.experience.estimates import estimate

GROUPS, MEMBERS, FAILING = 5, 4, 2
REWARD = """
def judge(samples):
    return [float("nan") if s.response_text in {bad} else float(int(s.response_text) % 3) for s in samples]
"""


def config(*overrides: str, folder: Path | None = None, bad: Sequence[str] = (), **reward: Any) -> Config:
    rewards = {}
    if folder is not None:
        (folder / "own.py").write_text(REWARD.format(bad=set(bad)))
        source = {"name": f"{folder / 'own.py'}:judge", "on_error": "drop_group", "max_error_share": 1.0} | reward
        rewards = {"rewards": [source]}
    rollout = {"prompts_per_step": GROUPS, "samples_per_prompt": MEMBERS, "max_new_tokens": 16}
    return smallest.config("algorithm.name=grpo", "algorithm.kl.coef=0", *overrides, rollout=rollout, **rewards)


def sample(group: int, member: int, first: int = 0) -> Sample:
    length = 2 + (3 * group + member) % 4
    number = first + MEMBERS * group + member
    return Sample(
        f"s{number}", f"g{first + group}", f"r{first + group}", [7, first + group], [1] * length, [1] * length,
        [-0.5] * length, [0] * length, "stop", response_text=str(number),
    )  # fmt: skip


def step_of(first: int = 0, groups: int = GROUPS) -> list[Sample]:
    return [sample(group, member, first) for group in range(groups) for member in range(MEMBERS)]


def a_run(settings: Config, more: Sequence[list[Sample]] = ()) -> Any:
    """A run in its sixth step, without processes: `more` are what further prompts are answered with."""
    run, rewards, said = object.__new__(RlRun), build_rewards(settings.rewards, settings.data), list[str]()
    rewards.tolerate(settings.rewards)
    run.config, run.step, run.metrics, run.phases = settings, 5, {}, Phases()
    run.inputs = RlInputs(None, None, [], [], [], 0, {}, rewards, [])
    run.session = SimpleNamespace(reward=rewards.score, recovery=None)
    run.sampler = SimpleNamespace(takes_pass_rates=True, record=lambda rates: run.rates.update(rates), figures=dict)
    run.progress = SimpleNamespace(say=said.append)
    run.reward_errors = SimpleNamespace(log=lambda step, record: said.append(f"step {step}: {record['samples']}"))
    run._greedy, run.scored_greedy = [], []
    further = iter(more)
    run.generate = lambda missing: next(further)[: missing * MEMBERS]
    run.rates, run.said = {}, said
    return run


def trained(run: Any, samples: list[Sample]) -> tuple[list[Sample], list[float]]:
    with run.phases.step():
        return run.replace_uniform_groups(samples, run.score(samples))


def numbers(samples: Sequence[Sample], rewards: Sequence[float], settings: Config) -> dict[str, Any]:
    """Advantages and loss weights of the rows, and the mini-batches, by sample id."""
    batch = Batch(samples)
    metrics = estimate(Experience(settings), batch, rewards)
    parts = mini_batch_rows(JoinedEpisodes(batch).batch, settings.algorithm.mini_batches, seed=3)
    found: dict[str, Any] = {"metrics": metrics, "parts": [[samples[row].sample_id for row in part] for part in parts]}
    for number, part in enumerate(parts):
        set_loss_weights(batch, part, settings)
        for row in part:
            columns = (batch.columns[name][row, : batch.lengths[row]].tolist() for name in ("advantages", "weights"))
            found[samples[row].sample_id] = number, *columns
    return found


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_plus_plus", "rloo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("mini_batches", [1, 2, 5])
def test_the_numbers_are_those_of_a_step_without_the_group(
    tmp_path: Path, advantage: str, aggregation: str, mini_batches: int
) -> None:
    overrides = f"algorithm={{advantage: {advantage}, aggregation: {aggregation}, mini_batches: {mini_batches}}}"
    settings = config(overrides, folder=tmp_path, bad=[str(MEMBERS * FAILING + 1)])
    run = a_run(settings)
    left, rewards = trained(run, step_of())
    never_there = [one for one in step_of() if one.group_id != f"g{FAILING}"]
    assert [one.sample_id for one in left] == [one.sample_id for one in never_there]
    expected = [float(int(one.response_text) % 3) for one in never_there]
    assert rewards == expected
    assert numbers(left, rewards, settings) == numbers(never_there, expected, settings)
    assert len(numbers(left, rewards, settings)["parts"]) == mini_batches
    assert run.inputs.rewards.tolerance.step_figures()["reward/dropped_groups"] == 1


def test_advantages_and_weights_are_those_of_the_formula_over_the_groups_that_are_left(tmp_path: Path) -> None:
    settings = config("algorithm.aggregation=token_mean", folder=tmp_path, bad=[str(MEMBERS * FAILING)])
    left, rewards = trained(a_run(settings), step_of())
    found = numbers(left, rewards, settings)
    tokens = sum(one.response_length for one in left)
    for group in (0, 1, 3, 4):
        of_group = torch.tensor([float((MEMBERS * group + member) % 3) for member in range(MEMBERS)], dtype=torch.float64)
        advantages = (of_group - of_group.mean()) / (of_group.std(correction=1) + settings.algorithm.advantage_eps)
        for member in range(MEMBERS):
            _, got, weights = found[f"s{MEMBERS * group + member}"]
            assert got == pytest.approx([float(advantages[member])] * len(got), abs=1e-6)
            assert weights == pytest.approx([1 / tokens] * len(weights))


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_two_replicas_share_what_is_left_and_their_sums_are_the_whole(tmp_path: Path, mini_batches: int) -> None:
    settings = config(f"algorithm.mini_batches={mini_batches}", "policy.layout.dp=2", folder=tmp_path, bad=["9", "13"])
    left, rewards = trained(a_run(settings), step_of())
    batch = Batch(left)
    estimate(Experience(settings), batch, rewards)
    for part in mini_batch_rows(batch, mini_batches, seed=0):
        set_loss_weights(batch, part, settings)
        units = batch.unit_rows(part, share_prefix=True)
        plan = plan_micro_batches(units.sizes, ranks=2, max_tokens=24, flops=SimpleNamespace(cost=lambda p, r, *_: p + sum(r)))
        shares = batch.shares(units, plan, ["advantages", "weights"])
        assert sorted(row for share in shares for row in share.rows.tolist()) == sorted(part)
        assert all(len(share.rows) for share in shares)
        total = sum(float((share.columns["advantages"] * share.columns["weights"]).sum()) for share in shares)
        whole = (batch.columns["advantages"] * batch.columns["weights"])[part].double().sum()
        assert total == pytest.approx(float(whole), abs=1e-6)
        assert sum(float(share.columns["weights"].sum()) for share in shares) == pytest.approx(
            float(batch.columns["weights"].sum())
        )


def test_only_the_groups_that_were_judged_are_remembered_for_their_pass_rate(tmp_path: Path) -> None:
    run = a_run(config(folder=tmp_path, bad=["9"]))
    trained(run, step_of())
    assert set(run.rates) == {"g0", "g1", "g3", "g4"}
    assert "step 6: ['s9']" in run.said
    assert any("own.py:judge' failed on 1 response, left out with their groups" in line for line in run.said)


def test_dynamic_sampling_draws_prompts_in_place_of_groups_that_were_left_out(tmp_path: Path) -> None:
    settings = config("rollout.dynamic_sampling_rounds=2", folder=tmp_path, bad=["9", "101"])
    run = a_run(settings, more=[step_of(first=100, groups=1), step_of(first=200, groups=1)])
    left, _ = trained(run, step_of())
    assert list(dict.fromkeys(one.group_id for one in left)) == ["g0", "g1", "g3", "g4", "g200"]
    assert run.metrics == {"rollout/dynamic_sampling_rounds": 2, "rollout/discarded_groups": 2}
    assert run.inputs.rewards.tolerance.dropped == {"g2", "g100"}


def test_after_the_last_round_a_step_lacks_groups_rather_than_trains_on_a_failure(tmp_path: Path) -> None:
    settings = config("rollout.dynamic_sampling_rounds=1", folder=tmp_path, bad=["9", "101"])
    left, _ = trained(a_run(settings, more=[step_of(first=100, groups=1)]), step_of())
    assert list(dict.fromkeys(one.group_id for one in left)) == ["g0", "g1", "g3", "g4"]


def test_a_greedy_response_that_was_not_judged_takes_its_group_along(tmp_path: Path) -> None:
    run = a_run(config(folder=tmp_path, bad=["77"]))
    greedy = [sample(group, 0) for group in range(GROUPS)]
    greedy[3].response_text = "77"
    run._greedy = greedy
    left, _ = trained(run, step_of())
    assert list(dict.fromkeys(one.group_id for one in left)) == ["g0", "g1", "g2", "g4"]
    assert [reward for _, reward in run.scored_greedy] == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert run._greedy == []


def test_a_step_without_enough_groups_stops_with_a_sentence(tmp_path: Path) -> None:
    everything = [one.response_text for one in step_of()]
    with pytest.raises(RewardError, match=r"5 of 5 prompt groups of a step were left out.*needs at least 1 responses"):
        trained(a_run(config(folder=tmp_path, bad=everything)), step_of())
    settings = config("algorithm.mini_batches=5", "policy.layout.dp=2", folder=tmp_path, bad=["0", "4", "8"])
    with pytest.raises(RewardError, match=r"3 of 5 prompt groups .*needs at least 10 responses"):
        trained(a_run(settings), step_of())
    settings = config("algorithm.mini_batches=5", "policy.layout.dp=2", folder=tmp_path, bad=["0", "4"])
    assert len(trained(a_run(settings), step_of())[0]) == 12


def test_mini_batches_of_any_number_of_rows_are_as_many_as_asked_and_differ_by_one_row_at_most() -> None:
    for groups in range(1, GROUPS + 1):
        batch = Batch(step_of(groups=groups))
        for count in range(1, len(batch) + 1):
            parts = mini_batch_rows(batch, count, seed=1)
            assert len(parts) == count
            assert sorted(row for part in parts for row in part) == [*range(len(batch))]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
