"""Every old name of a field or value is one sentence with the new one, in files and in overrides, also in another section."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from megarl.config import config_fields, load_config, parse_config, parse_supervised_config
from megarl.config.renamed import RENAMED, RENAMED_VALUES
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError
from tests.config.smallest import RL

KNOWN = {field.name for field in config_fields()}


def sentence(*overrides: str, tree: dict[str, Any] = RL) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(apply_overrides(tree, overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new in RENAMED.items() if "[]" not in old])
def test_an_old_field_is_refused_with_its_new_name(old: str, new: str) -> None:
    assert sentence(f"{old}=1") == f"{old} was renamed: write {new} instead"
    assert old not in KNOWN
    if not re.match(r"(data\.eval|ptx\.data)\.", new):  # these sections have the fields of data.train
        assert any(f"{name}.".replace("[].", ".").startswith(f"{new}.") for name in KNOWN)


def test_an_old_field_in_a_file_is_refused_too(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RL | {"algorithm": {"kl": {"where": "reward"}}}))
    with pytest.raises(ConfigError, match=r"^algorithm\.kl\.where was renamed: write algorithm\.kl\.apply_to instead$"):
        load_config(tmp_path / "run.yaml")


def test_an_old_field_of_a_list_s_entry_is_named_with_its_number() -> None:
    parts = "data.train={source: mixture, parts: [{name: a}, {name: b, fields: {x: y}}]}"
    assert sentence(parts) == "data.train.parts[1].fields was renamed: write data.train.parts[1].columns instead"


def test_old_fields_of_given_responses_are_refused_too() -> None:
    tree = {"model": {"path": "x"}, "data": {"train": {"source": "jsonl", "path": "x"}}, "run": {"restarts": 3}}
    with pytest.raises(ConfigError, match=r"run\.restarts was renamed: write run\.max_restarts instead"):
        parse_supervised_config(tree)


@pytest.mark.parametrize(
    ("field", "old", "new"), [(field, old, new) for field, values in RENAMED_VALUES.items() for old, new in values.items()]
)
def test_an_old_value_is_refused_with_its_new_name(field: str, old: str, new: str) -> None:
    assert sentence(f"{field}={old}") == f"{field} is '{old}', which was renamed: write '{new}' instead"
    parts = {"rollout.servers": {"urls": ["http://a"]}} if new == "folder" else {}
    parse_config(apply_overrides(RL, [f"{field}={new}", *(f"{name}={value}" for name, value in parts.items())]))


def test_an_old_field_with_an_old_value_is_one_sentence() -> None:
    assert (
        sentence("rollout.sync=disk")
        == "rollout.sync was renamed: write rollout.weight_transport instead; its value 'disk' is now 'folder'"
    )


@pytest.mark.parametrize(
    ("old", "section"),
    [
        ("stop if kl/reference above 0.5 for 3 steps", "{metric: kl/reference, above: 0.5, action: stop, for_steps: 3}"),
        ("skip if policy/grad_norm above 1e2", "{metric: policy/grad_norm, above: 1e2, action: skip}"),
        ("rollback if reward/mean below -1", "{metric: reward/mean, below: -1, action: rollback}"),
        ("stop when it hurts", "{metric: kl/reference, above: 0.5, action: stop, for_steps: 3}"),
    ],
)
def test_a_guard_in_words_is_shown_as_the_section_that_it_is_now(old: str, section: str) -> None:
    assert sentence(f"run.guards=[{old}]") == f"run.guards[0] is '{old}'; it must be a section such as {section}"
    saves = ["run.save_every=1", f"run.guards=[{section}]"]
    assert len(parse_config(apply_overrides(RL, saves)).run.guards) == 1


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("policy.lr", "policy.optimizer.lr"),
        ("run.temperature", "rollout.temperature"),
        ("algorithm.samples_per_prompt", "rollout.samples_per_prompt"),
        ("run.advantage", "algorithm.advantage"),
        ("policy.max_staleness", "rollout.schedule.max_staleness"),
        # old names, in a section that never had them
        ("rollout.staleness", "rollout.schedule.max_staleness"),
        ("policy.lam", "algorithm.gae_lambda"),
        ("critic.share_prompts", "policy.share_prefix"),
        ("algorithm.where", "algorithm.kl.apply_to"),
        ("rollout.urls", "rollout.servers.urls"),
        ("resources.restarts", "run.max_restarts"),
    ],
)
def test_a_field_in_the_wrong_section_is_refused_with_the_right_one(wrong: str, right: str) -> None:
    assert sentence(f"{wrong}=1").startswith(f"{wrong} is not a config field (did you mean '{right}'?)")
    assert right in KNOWN


def test_arguments_of_sglang_s_that_are_fields_now_are_refused_together_with_others() -> None:
    text = sentence("rollout.engine_args={mem_fraction_static: 0.5, port: 3}")
    assert text == "rollout.engine_args.port was renamed: write rollout.servers.port instead"
