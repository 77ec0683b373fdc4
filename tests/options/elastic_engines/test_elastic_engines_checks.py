"""`rollout.engines: {min, max}`: what it stands for, what it does not go with, and what a plan says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.config import Config, parse_config
from megarl.errors import ConfigError, DeadlineError
from megarl.options.elastic_engines import requests
from megarl.options.elastic_engines.section import max_engines_of

ROOT = Path(__file__).parents[3]


def config_of(engines: Any, rollout: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A run with these engines, of SGLang."""
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}},
        "rewards": [{"name": "exact_number"}],
        "resources": {"placement": "separate"},
        "rollout": {"engines": engines, "weight_transport": "process_group"} | (rollout or {}),
    }
    return parse_config(tree | sections)


def test_min_and_max_are_two_fields_and_a_number_stays_a_fixed_number() -> None:
    rollout = config_of({"min": 4, "max": 64}).rollout
    assert (rollout.engines, max_engines_of(rollout), rollout.further_engines) == (4, 64, 60)
    assert rollout == config_of(4, {"max_engines": 64}).rollout
    fixed = config_of(4).rollout
    assert (fixed.engines, max_engines_of(fixed), fixed.further_engines) == (4, None, None)


@pytest.mark.parametrize(
    ("engines", "rollout", "sections", "message"),
    [
        (
            {"min": 8, "max": 4},
            {},
            {},
            "rollout.engines.min is 8, which is above rollout.engines.max = 4; it must be at most 4",
        ),
        ({"min": 0, "max": 4}, {}, {}, "rollout.engines.min is 0; it must be a whole number of at least 1"),
        ({"min": 1, "max": "many"}, {}, {}, "rollout.engines.max is 'many'; it must be a whole number of at least 1"),
        ({"min": 1}, {}, {}, "it must be a whole number above 0, or {min, max} with two of them"),
        ({"min": 1, "max": 4}, {"max_engines": 5}, {}, "rollout.max_engines is 5, which contradicts rollout.engines.max = 4"),
        (4, {"max_engines": 2}, {}, "rollout.max_engines is 2, which is below rollout.engines = 4; it must be at least 4"),
        ({"min": 1, "max": 4}, {}, {"resources": {"placement": "colocated"}}, "set resources.placement to 'separate'"),
        ({"min": 1, "max": 4}, {"weight_transport": "shared_memory"}, {}, "'shared_memory' does not reach them"),
        ({"min": 1, "max": 4}, {"servers": {"port": 65533}}, {}, "leaves too few ports"),
        (
            {"min": 1, "max": 4},
            {"weight_transport": "folder", "servers": {"urls": ["http://a"]}},
            {},
            "on servers that run already does not have; it must be null",
        ),
        (
            {"min": 1, "max": 4},
            {"weight_transport": "shared_memory", "schedule": {"mode": "async", "lent_engines": 1}},
            {"algorithm": {"kl": {"coef": 0.0}}},
            "does not go with engines that are lent the trainer's GPUs",
        ),
        (
            2,
            {"engine": "embedded", "sites": {}},
            {},
            "rollout.sites needs engines that come and go: set rollout.engines to {min",
        ),
        (
            {"min": 1, "max": 4},
            {"sites": {"port": 0}},
            {},
            "needs engines that give their weights to each other, as rollout.engine = 'sglang' does not; it must be null",
        ),
        (
            {"min": 1, "max": 4},
            {"engine": "embedded", "sites": {}, "servers": {"model_path": "m-fp8"}},
            {},
            "does not go with weights in few bits (rollout.servers.model_path)",
        ),
        (
            {"min": 3, "max": 4},
            {"engine": "embedded", "sites": {"engines": 2}},
            {},
            "rollout.sites.engines is 2, which leaves less than rollout.engines = 3 of rollout.max_engines = 4 to the run's "
            "own nodes; it must be at most 1",
        ),
        ({"min": 1, "max": 4}, {"engine": "embedded", "sites": {"port": 70000}}, {}, "rollout.sites.port is 70000"),
    ],
)
def test_what_they_do_not_go_with_is_one_sentence(
    engines: Any, rollout: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(engines, rollout, **sections)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_tells_how_many_engines_there_may_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    plan = "tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml"
    fields = ["resources.placement=separate", "policy.layout={tp: 4, dp: 1, sequence_parallel: true}"]
    fields += ["rollout.weight_transport=process_group", "rollout.tp=1", "rollout.engines={min: 2, max: 12}"]
    assert cli.main(["plan", plan, *fields, "--gpu", "h100"]) in (0, 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "Engines come and go: at least 2, as which the step is planned, and at most 12, on 10 further GPUs" in said


def test_a_node_is_asked_to_leave_by_a_file_that_is_gone_when_it_may_go(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no engines\.json"):
        requests.ask_to_leave(tmp_path, "10.0.0.2", 0.0)
    engines = [{"number": 3, "node": "10.0.0.2/ab12", "node_id": "ab12cd", "stage": "there"}]
    requests.tell(tmp_path, {"ab12cd": "10.0.0.2/ab12", "ff00ff": "10.0.0.3"}, engines)
    with pytest.raises(ConfigError, match=r"has no node 'nobody'; it must be 10.0.0.2/ab12 or 10.0.0.3"):
        requests.ask_to_leave(tmp_path, "nobody", 0.0)
    assert requests.asked_to_leave(tmp_path) == {}
    for node in ("10.0.0.2/ab12", "ab12cd"):
        with pytest.raises(DeadlineError, match="has not let node"):
            requests.ask_to_leave(tmp_path, node, 0.0)
        asked = requests.asked_to_leave(tmp_path)
        assert [*asked] == [node]
        asked[node].unlink()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, "{}", '{"nodes": [], "engines": []}', '{"nodes": {}, "engines": [3]}']
)
def test_damaged_places_of_engines_are_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "engines.json").write_text(text)
    with pytest.raises(
        ConfigError, match=r"engines\.json is damaged or not of a run \(.*\); the run writes it anew when it starts"
    ):
        requests.ask_to_leave(tmp_path, "a", 0.0)
    assert [*tmp_path.iterdir()] == [tmp_path / "engines.json"]


def test_the_command_says_which_engines_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "ask_to_leave", lambda folder, node, wait_s: [3, 5] if wait_s == 180.0 else [])
    assert cli.main(["node", "leave", str(tmp_path), "10.0.0.2"]) == 0
    assert capsys.readouterr().out == "2 engines left 10.0.0.2: 3, 5\n"
    monkeypatch.undo()
    assert cli.main(["node", "leave", str(tmp_path), "10.0.0.2"]) == 2
    assert "has no engines.json" in capsys.readouterr().err
