"""Every field of the config has one answer to a change at resume."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest

from megarl.config import Config, SupervisedConfig, config_fields, to_yaml
from megarl.config.at_resume import KINDS, answer_for, at_resume, changes
from megarl.config.yaml_tree import load_text, tree_leaves
from megarl.option_list import OPTIONS
from tests.config import smallest

FIELDS = sorted({field.name for root in (Config, SupervisedConfig) for field in config_fields(root)})


def test_every_field_has_an_answer_and_every_answer_a_field() -> None:
    table = at_resume()
    assert [name for name in FIELDS if name not in table] == [], "say in at_resume.py what a change at resume does"
    assert [name for name in table if name not in FIELDS] == [], "answers of fields that are gone"
    for name, answer in table.items():
        assert answer.kind in KINDS, name
        if answer.kind in ("like", "steered"):
            assert any(field == answer.note or field.startswith(f"{answer.note}.") for field in FIELDS), name
        if answer.kind in ("refused", "kept"):
            assert answer.note, f"{name} needs a reason"


def changed_at(tree: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`tree` and a copy that has another value under `name`; a list has one entry, and a mapping one key, in both."""
    before, after = deepcopy(tree), deepcopy(tree)
    for value, side in (("old", before), ("new", after)):
        place: Any = side
        *path, last = name.split(".")
        for key in path:
            plain = key.removesuffix("[]")
            if key != plain:
                if not place.get(plain):
                    place[plain] = [{}]
                place = place[plain][0]
            else:
                if not isinstance(place.get(plain), dict):
                    place[plain] = {}
                place = place[plain]
        place[last] = [value] if last == "freeze" else value
    return before, after


@pytest.mark.parametrize("name", FIELDS)
def test_a_change_of_a_field_is_found_and_gets_its_answer(name: str) -> None:
    root = smallest.supervised() if name.startswith("objective.") else smallest.config()
    before, after = changed_at(load_text(to_yaml(root)), name)
    found = changes(before, after)
    if name in ("run.name", "run.folder", "run.resume"):  # of every resumed run
        assert found == []
        return
    [change] = found
    assert re.sub(r"\[\d\]", "[]", change.name) == name
    assert change.answer.kind in ("applied", "refused", "kept", "rows")
    expected = answer_for(name, at_resume()).kind
    assert change.answer.kind == {"grows": "refused", "steered": "applied"}.get(expected, expected)


def test_sections_of_another_have_the_answers_of_its_fields() -> None:
    table = at_resume()
    assert answer_for("critic.optimizer.name", table) == table["policy.optimizer.name"]
    if "ptx" in OPTIONS:
        assert answer_for("ptx.data.path", table).kind == "rows"
    assert answer_for("data.train.parts[1].weight", table).kind == "applied"
    assert answer_for("data.train.columns.answer", table).kind == "rows"
    if "lora" in OPTIONS:
        assert answer_for("policy.lora", table).kind == "refused"


def kinds(*overrides: str, before: tuple[str, ...] = ()) -> dict[str, str]:
    """By name of what changes with `overrides`, the kind of its answer."""
    old, new = (load_text(to_yaml(smallest.config(*said))) for said in (before, (*before, *overrides)))
    return {change.name: change.answer.kind for change in changes(old, new)}


def test_a_weight_that_is_steered_is_kept_while_a_target_steers_it() -> None:
    in_reward = ("algorithm.kl.apply_to=reward", "algorithm.kl.coef=0.1")
    assert kinds("algorithm.kl.coef=0.2", before=in_reward) == {"algorithm.kl.coef": "applied"}
    steered = (*in_reward, "algorithm.kl.target=0.01", "algorithm.kl.horizon=100")
    assert kinds("algorithm.kl.coef=0.2", before=steered) == {"algorithm.kl.coef": "kept"}


def test_more_may_be_frozen_and_nothing_freed() -> None:
    assert kinds("policy.freeze=[router]") == {"policy.freeze": "applied"}
    assert kinds("policy.freeze=[]", before=("policy.freeze=[router]",)) == {"policy.freeze": "refused"}


def test_lists_of_sections_are_compared_entry_by_entry() -> None:
    one, other = (f"rewards=[{{name: reasoning_gym, weight: {weight}}}]" for weight in (1.0, 2.0))
    assert kinds(other, before=(one,)) == {"rewards[0].weight": "applied"}
    assert dict(tree_leaves(load_text(to_yaml(smallest.config()))))["run.seed"] == 0
