"""Rules about metrics: what each says, when it is due, and that what was counted outlives a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megarl.config.guard_rules import GuardConfig, GuardRule, parse_guards, skip_rules
from megarl.errors import CheckpointError, ConfigError, GuardError
from megarl.runs.guards import Guards, newest_sound_before

UPDATE = ("policy/grad_norm", "kl/reference")
STEP = {"policy/grad_norm": 1.0, "kl/reference": 0.1, "reward/mean": 0.5}


def guard(action: str, metric: str, **fields: float) -> GuardConfig:
    return GuardConfig.model_validate({"action": action, "metric": metric, **fields})


def see(guards: Guards, **changes: float) -> GuardRule | None:
    """A step whose metrics are `STEP` but for `changes`, whose names have _ for /."""
    return guards.check_step(STEP | {name.replace("_", "/", 1): value for name, value in changes.items()}, UPDATE)


def test_a_rule_says_its_guard_in_one_line() -> None:
    guards = [
        guard("stop", "kl/reference", above=0.5, for_steps=3),
        guard("skip", "policy/grad_norm", above=1e2),
        guard("rollback", "reward/mean", below=-1),
    ]
    assert parse_guards(guards) == (
        GuardRule("stop", "kl/reference", "above", 0.5, 3),
        GuardRule("skip", "policy/grad_norm", "above", 100.0, 1),
        GuardRule("rollback", "reward/mean", "below", -1.0, 1),
    )
    assert [str(rule) for rule in parse_guards(guards)] == [
        "stop if kl/reference above 0.5 for 3 steps",
        "skip if policy/grad_norm above 100",
        "rollback if reward/mean below -1",
    ]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"action": "stop"}, "run.guards[0] needs a bound: set run.guards[0].above or run.guards[0].below"),
        (
            {"action": "stop", "above": 1, "below": 2},
            "run.guards[0].below is 2.0, which stands beside above; it must be in a guard of its own",
        ),
        (
            {"action": "skip", "above": 1, "for_steps": 2},
            "run.guards[0].for_steps is 2, which action = 'skip' cannot wait for: an update is skipped at once; it must be 1",
        ),
    ],
)
def test_a_guard_that_contradicts_itself_is_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_guards([GuardConfig(metric="kl/reference", **fields)])
    assert str(caught.value) == sentence


def test_each_role_judges_its_own_metrics() -> None:
    guards = [guard("skip", name, above=1) for name in ("policy/grad_norm", "critic/grad_norm", "kl/reference", "train/loss")]
    guards.append(guard("stop", "policy/grad_norm", above=9))

    def metrics(*arguments: str, others: tuple[str, ...] = ()) -> list[str]:
        return [rule.metric for rule in skip_rules(guards, *arguments, others=others)]

    assert metrics("policy", "policy", others=("critic",)) == ["grad_norm", "kl/reference", "train/loss"]
    assert metrics("critic", "critic", others=("policy",)) == ["grad_norm", "kl/reference", "train/loss"]
    assert metrics("policy", "train")[-1] == "loss"


def test_who_watches_is_told_how_often_each_rule_applied() -> None:
    rules = [
        guard("rollback", "kl/reference", above=1),
        guard("skip", "reward/mean", above=2),
        guard("stop", "policy/grad_norm", above=9),
    ]
    guards = Guards(rules)
    back, skip, stop = map(str, guards.rules)
    assert guards.counts().applied == {back: 0, skip: 0, stop: 0}
    for reward in (1.0, 3.0, 4.0):
        guards.should_skip({"reward/mean": reward})
    guards.record_update({"policy/skipped": 1.0, "critic/skipped": 0.0})
    assert see(guards, kl_reference=2.0) is not None
    guards.went_back()
    see(guards, kl_reference=0.5)
    with pytest.raises(GuardError):
        see(guards, policy_grad_norm=10.0)
    counts = guards.counts()
    assert (counts.applied, counts.rollbacks) == ({back: 1, skip: 2, stop: 1}, 1)
    assert counts.skipped == {"policy": 1, "critic": 0}
    continued = Guards(rules)
    continued.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    assert continued.counts() == counts


def test_a_rule_is_due_after_its_steps_in_a_row() -> None:
    guards = Guards([guard("rollback", "kl/reference", above=1, for_steps=3)])
    seen = [see(guards, kl_reference=value) for value in (2, 2, 0.5, 2, 2, math.nan)]
    assert seen == [None] * 5 + [guards.rules[0]]
    guards.went_back()
    assert [see(guards, kl_reference=2) for _ in range(2)] == [None, None]
    assert guards.figures() == {"guards/skipped": 0.0, "guards/rollbacks": 1.0}


def test_a_reward_that_collapses_stops_the_run() -> None:
    guards = Guards([guard("stop", "reward/mean", below=0.05, for_steps=2)])
    see(guards, reward_mean=0.01)
    with pytest.raises(GuardError, match=r"'stop if reward/mean below 0.05 for 2 steps' applies: reward/mean is 0.02"):
        see(guards, reward_mean=0.02)


def test_a_run_goes_back_three_times_at_most() -> None:
    guards = Guards([guard("rollback", "kl/reference", above=1)])
    for _ in range(3):
        assert see(guards, kl_reference=2) is not None
        guards.went_back()
    with pytest.raises(GuardError, match="went back 3 times already"):
        see(guards, kl_reference=2)


def test_three_updates_in_a_row_that_are_not_finite_stop_the_run_also_across_a_resume() -> None:
    broken = {"policy/skipped": 1.0, "policy/non_finite": 1.0, "critic/skipped": 0.0, "critic/non_finite": 0.0}
    guards = Guards([])
    for update in (broken, broken, broken | {"policy/skipped": 0.0, "policy/non_finite": 0.0}, broken, broken):
        guards.record_update(update)
        see(guards)
    resumed = Guards([])
    resumed.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    assert resumed.figures()["guards/skipped"] == 4
    resumed.record_update(broken)
    with pytest.raises(GuardError, match="policy: 3 updates in a row"):
        see(resumed)


def test_a_half_counted_rule_goes_on_after_a_resume() -> None:
    rule = guard("rollback", "kl/reference", above=1, for_steps=2)
    guards, resumed = Guards([rule]), Guards([rule])
    assert see(guards, kl_reference=2) is None
    resumed.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    assert see(resumed, kl_reference=2) == resumed.rules[0]


def test_what_is_known_before_an_update_can_forbid_it() -> None:
    guards = Guards([guard("skip", "reward/mean", above=10), guard("stop", "reward/mean", above=0)])
    assert not guards.should_skip({"reward/mean": 9.0})
    assert guards.should_skip({"reward/mean": 11.0})
    assert guards.should_skip({"reward/mean": math.nan})


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (guard("stop", "kl/refrence", above=1), "has no metric 'kl/refrence' (did you mean 'kl/reference'?)"),
        (guard("skip", "response/tokens_mean", above=1), "response/tokens_mean is known only after the update"),
    ],
)
def test_a_rule_about_a_metric_that_is_not_there_is_a_sentence_after_one_step(wrong: GuardConfig, part: str) -> None:
    guards = Guards([wrong, guard("stop", "eval/accuracy", below=0)])
    guards.check_step({"critic/loss": 1.0}, [])  # the critic warms up: the policy has no figures yet
    with pytest.raises(ConfigError) as caught:
        see(guards, response_tokens_mean=3.0)
    assert part in str(caught.value)


def test_a_run_goes_back_to_before_the_first_step_that_broke_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tmp_path / f"step_{step:06d}" for step in (2, 4, 6)]
    damaged: list[Path] = []

    def check(path: Path) -> None:
        if path in damaged:
            raise CheckpointError("damaged")

    monkeypatch.setattr("megarl.runs.guards.check", check)
    (rule,) = parse_guards([guard("rollback", "kl/reference", above=1, for_steps=2)])
    assert newest_sound_before(found, 6, rule) == found[1]  # the steps 5 and 6 broke it
    assert newest_sound_before(found, 5, rule) == found[0]
    damaged.append(found[1])
    assert newest_sound_before(found, 6, rule) == found[0]
    damaged.append(found[0])
    with pytest.raises(GuardError, match="no sound checkpoint from before that"):
        newest_sound_before(found, 6, rule)
