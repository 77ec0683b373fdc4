"""The way of weights that a config chooses: what it does not go with is a sentence, and plans and rehearsals know of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.config import Config, load_any, load_config
from megarl.errors import ConfigError
from megarl.launch.rehearse import planned_placement
from megarl.planning.gpus import gpu_named
from megarl.planning.plan import make_plan
from megarl.rollout.engines.registry import CLASSES, load_engine
from tests.config.smallest import config
from tests.example_plans import PLANS
from tests.launch.test_rehearse import CONFIG

ROOT = Path(__file__).parents[3]
APART = ("rollout.weight_transport=rdma", "resources.placement=separate")


def config_of(placement: str = "separate", **rollout: object) -> Config:
    """A config whose section `rollout` has these fields."""
    return config(rollout=rollout, resources={"placement": placement})


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What `megarl rehearse` prints of weights."""
    assert cli.main(["rehearse", "c.yaml", "--placement-only", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["weights"]


@pytest.fixture
def _with_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG.replace("MODELS", str(ROOT / "examples" / "models")))


def test_rdma_is_for_servers_on_gpus_of_their_own() -> None:
    colocated = (
        "rollout.weight_transport is 'rdma', which is for engines with GPUs of their own, but resources.placement is "
        "'colocated'; it must be 'shared_memory'"
    )
    with pytest.raises(ConfigError, match=re.escape(colocated)):
        config_of(weight_transport="rdma", placement="colocated")
    embedded = "rollout.weight_transport = 'rdma' needs rollout.engine = 'sglang': set rollout.engine"
    with pytest.raises(ConfigError, match=re.escape(embedded)):
        config_of(weight_transport="rdma", engine="embedded")


@pytest.mark.parametrize("is_installed", [True, False])
def test_rdma_without_nixl_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    monkeypatch.setattr("megarl.rollout.engines.sglang.engine.check_model", lambda *_: None)
    monkeypatch.setattr("megarl.options.transports.checks.find_spec", lambda name: name if is_installed else None)
    check = load_engine(CLASSES["sglang"]).check
    config = config_of(engine="sglang", weight_transport="rdma")
    if is_installed:
        check(config, "cpu")
        return
    sentence = (
        "rollout.weight_transport = 'rdma' needs NIXL, which is not installed: pip install 'megarl[rdma]', or choose another"
    )
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check(config, "cpu")
    check(config_of(engine="sglang", weight_transport="process_group"), "cpu")


@pytest.mark.usefixtures("_with_config")
def test_by_rdma_ranks_stage_what_engines_read_and_no_process_group_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "c.yaml", "--reshard", *APART]) == 0
    out = re.sub(" +", " ", capsys.readouterr().out)
    assert "redundancy 1.000 bytes" in out
    assert "peak staging 2.13 GB on a sending rank" in out
    assert "communicators none: engines read what is staged" in out


def test_registered_buffers_are_planned_for_and_no_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("examples/plans/llama-3.1-8b-grpo-8xh100.yaml", ["policy.layout={dp: 8}", *APART])
    assert make_plan(config, gpu_named("h200")).memory.worst.parts["policy", "staging"] == 2 * 2**30


@pytest.mark.usefixtures("_with_config")
def test_a_rehearsal_says_what_goes_by_relays(capsys: pytest.CaptureFixture[str]) -> None:
    whole = 2 * 8_030_261_248  # half of the engine's ranks are on the other node
    assert said(capsys, "--gpus-per-node=2")["bytes_by_relays"] == pytest.approx(whole / 2, rel=1e-2)
    assert "bytes_by_relays" not in said(capsys, "--gpus-per-node=4")
    by_rdma = said(capsys, "--gpus-per-node=2", *APART)  # an engine reads from another machine, too
    assert by_rdma.keys() == {"transport", "bytes_sent", "bytes_received"}


@pytest.mark.usefixtures("_with_config")
def test_a_rehearsal_refuses_shared_memory_that_no_relay_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--placement-only", "--gpus-per-node=2", "policy.layout={tp: 2}"]
    assert cli.main(["rehearse", "c.yaml", *arguments]) == 2
    assert "'shared_memory', which cannot take weights from rank 1" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_weights_reach_the_engines_of_every_example_plan(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_any(plan)
    assert planned_placement(config, 8).ranks.keys() == config.layouts.keys()
