"""What a plan says of lending the trainer's GPUs: the seconds of a step, room for the engines, and the hint to do it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl import cli
from megarl.config import load_config
from megarl.options.lending.times import lending_of
from megarl.planning.gpus import gpu_named
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.turns import ALL_AT_ONCE, ASLEEP_BYTES, GENERATING, TRAINING, UPDATING
from tests.planning.printed import planned

ROOT = Path(__file__).parents[3]
PLAN = (
    "tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml", "resources.placement=separate", "rollout.schedule.mode=async",
    "policy.layout={tp: 4, dp: 1, sequence_parallel: true}", "rollout.engines=2", "rollout.schedule.lent_engines=4",
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan_of(*overrides: str) -> CapacityPlan:
    path, *own = PLAN
    return make_plan(load_config(path, [*own, *overrides]), gpu_named("h100"))


def step_of_sums(generation: float, rest: float, cost: float, more: float) -> float:
    """The step in which engines of one, and for the last part `1 + more`, make all responses of a step: by halving."""
    low, high = rest + cost, generation
    for _ in range(60):
        step = (low + high) / 2
        made = step / generation + (step - rest - cost) / generation * more
        low, high = (step, high) if made < 1 else (low, step)
    return low


@pytest.mark.parametrize("engines", [1, 2])
def test_a_step_ends_when_all_engines_together_have_made_its_responses(engines: int) -> None:
    plan = plan_of(f"rollout.engines={engines}")
    lending, times = lending_of(plan), plan.times
    assert lending is not None
    assert lending.pays
    assert 0 < lending.cost_s < lending.idle_s
    assert lending.without_s == times.seconds("generate")
    assert lending.idle_s == pytest.approx(times.seconds("generate") - times.trainer_seconds)
    expected = step_of_sums(times.seconds("generate"), times.trainer_seconds, lending.cost_s, 4 / engines)
    assert lending.step_s == times.step_seconds == pytest.approx(expected)


def test_where_the_trainer_does_not_wait_for_longer_than_lending_takes_nothing_changes() -> None:
    lending = lending_of(plan_of("rollout.engines=6"))
    assert lending is not None
    assert not lending.pays
    assert (lending.gain, lending.step_s) == (0.0, lending.without_s)


def test_the_trainers_gpus_have_room_for_lent_engines_in_their_turn_and_the_others_keep_theirs() -> None:
    lent, without = plan_of().memory, plan_of("rollout.schedule.lent_engines=0").memory
    [policy, engine], [_, engine_before] = lent.gpus, without.gpus
    assert engine == engine_before
    assert lent.kv_tokens == without.kv_tokens
    assert [*policy.turns] == [TRAINING, UPDATING, GENERATING]
    assert [*engine.turns] == [ALL_AT_ONCE]
    assert policy.turns[TRAINING]["engine", "asleep"] == ASLEEP_BYTES
    assert {owner for owner, _ in policy.turns[GENERATING]} == {"engine", "process"}
    assert policy.turns[UPDATING]["policy", "parameters"] > 0
    assert 0 < policy.turns[GENERATING]["engine", "KV cache"] < engine.parts["engine", "KV cache"]
    assert lent.fits
    moved = lent.host_bytes_of_a_node - without.host_bytes_of_a_node
    kept = policy.turns[TRAINING]
    of_roles = kept["policy", "parameters"] + kept["policy", "optimizer"] + kept["reference", "parameters"]
    assert moved == pytest.approx(8 * of_roles, rel=1e-6)


def test_a_plan_says_what_lending_would_gain_and_what_it_gains(capsys: pytest.CaptureFixture[str]) -> None:
    gained = planned(capsys, *PLAN)["times"]
    would_gain = planned(capsys, *PLAN, "rollout.schedule.lent_engines=0")["times"]
    assert gained["lending"] == would_gain["lending"]
    assert gained["step_s"] == gained["lending"]["step_s"] < would_gain["step_s"] == gained["lending"]["without_s"]

    def said(*overrides: str) -> str:
        assert cli.main(["plan", *PLAN, *overrides]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("The trainer")] or [""]
        return line

    assert "; with rollout.schedule.lent_engines=4 a step would take " in said("rollout.schedule.lent_engines=0")
    assert "without rollout.schedule.lent_engines; a step with them takes " in said()
    assert said("rollout.engines=6") == "The trainer never waits: lent engines would be left asleep"
    assert said("rollout.engines=6", "rollout.schedule.lent_engines=0") == ""
    none = "rollout.schedule.lent_engines=0"
    sync = (none, "rollout.schedule.mode=sync", "resources.placement=colocated", "rollout.engines=4")
    assert said(*sync) == ""
