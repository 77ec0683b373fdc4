"""The alerting rules name what a run serves and nothing else; where promtool is installed, each fires when it should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megarl.config import parse_config
from megarl.observe.run_state import EngineStatus, GuardCounts, RunState, SlowRank
from megarl.options.telemetry.prometheus import exposition, prometheus_name
from tests.observe.documented import documented

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
RULES = FOLDER / "alerts.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (apt-get install prometheus)")
RUN = 'job="megarl", instance="m:1", run="r"'
FIRES: dict[str, dict[str, str]] = {
    "MegarlEndpointGone": {'up{job="megarl", instance="m:1"}': "0x60"},
    "MegarlNoStep": {f"megarl_run_progress_timestamp_seconds{{{RUN}}}": "0x60", f"megarl_time_step_s{{{RUN}}}": "60x60"},
    "MegarlRestarted": {f"megarl_run_restarts_total{{{RUN}}}": "0x30 1x30"},
    "MegarlEngineDown": {f'megarl_engine_up{{{RUN}, engine="1"}}': "1x10 0x50"},
    "MegarlEngineFailsOften": {f'megarl_engine_failures_total{{{RUN}, engine="1"}}': "0+1x60"},
    "MegarlRankDoesNotAnswer": {f'megarl_ranks{{{RUN}, group="policy", state="silent"}}': "0x10 1x50"},
    "MegarlRankIsSlow": {f'megarl_ranks_slow{{{RUN}, group="policy", rank="3", node="10.0.0.7", phase="update"}}': "0.1x60"},
    "MegarlTrainerAndEngineDiffer": {f"megarl_mismatch_k3{{{RUN}}}": "0.1x60"},
    "MegarlKlExplodes": {f"megarl_kl_reference{{{RUN}}}": "5x60"},
    "MegarlNotFinite": {f"megarl_policy_loss{{{RUN}}}": " ".join(["NaN"] * 61)},
    "MegarlUpdatesSkipped": {f'megarl_run_skipped_updates_total{{{RUN}, role="policy"}}': "0x45 2x15"},
    "MegarlGuardApplied": {f'megarl_run_guards_applied_total{{{RUN}, guard="stop if a above 1"}}': "0x45 1x15"},
    "MegarlCheckpointOld": {f"megarl_run_start_timestamp_seconds{{{RUN}}}": "-7200x60"},
    "MegarlDiskFills": {f"megarl_run_disk_free_bytes{{{RUN}}}": "4x60", f"megarl_run_disk_size_bytes{{{RUN}}}": "100x60"},
}
"""By alert, series of a value per minute with which it is on after an hour."""
CALM = {
    'up{job="megarl", instance="m:1"}': "1x60",
    f"megarl_run_progress_timestamp_seconds{{{RUN}}}": "0+60x60",
    f"megarl_run_restarts_total{{{RUN}}}": "1x60",
    f'megarl_engine_up{{{RUN}, engine="1"}}': "1x50 0x2 1x8",
    f'megarl_engine_failures_total{{{RUN}, engine="1"}}': "0x50 1x10",
    f'megarl_ranks{{{RUN}, group="policy", state="gone"}}': "0x60",
    f'megarl_ranks{{{RUN}, group="policy", state="up"}}': "2x60",
    f"megarl_mismatch_k3{{{RUN}}}": "0.001x60",
    f"megarl_kl_reference{{{RUN}}}": "0.1x60",
    f"megarl_policy_non_finite{{{RUN}}}": "0x60",
    f"megarl_policy_loss{{{RUN}}}": "-0.5x60",
    f'megarl_run_skipped_updates_total{{{RUN}, role="policy"}}': "2x60",
    f'megarl_run_guards_applied_total{{{RUN}, guard="stop if a above 1"}}': "0x60",
    f"megarl_run_checkpoint_timestamp_seconds{{{RUN}}}": "0+60x60",
    f"megarl_run_start_timestamp_seconds{{{RUN}}}": "-90000x60",
    f"megarl_run_disk_free_bytes{{{RUN}}}": "50x60",
    f"megarl_run_disk_size_bytes{{{RUN}}}": "100x60",
}
"""A run that goes well; an engine of it was down for two minutes, and another checkpoint is written every minute."""


def rules() -> list[dict[str, Any]]:
    return yaml.safe_load(RULES.read_text())["groups"][0]["rules"]


def served(folder: Path) -> set[str]:
    """The names of all series that a run can serve: of itself by asking one, of its steps by docs/metrics.md."""
    tree = {"run": {"folder": str(folder)}, "model": {"path": "m"}, "rewards": [{"name": "exact_number"}]}
    run = RunState(parse_config(tree | {"data": {"train": {"source": "jsonl", "path": "rows.jsonl"}}}))
    (folder / "run").mkdir()
    (folder / "step_000001").mkdir()
    run.engines = lambda: [EngineStatus(0, "up", 1, 0, 0)]
    run.ranks = {"policy": lambda: ["up"]}
    run.slow_ranks = lambda: [SlowRank("policy", 3, "10.0.0.7", "update", 0.1)]
    run.guards = lambda: GuardCounts({"policy": 0}, 0, {"rule": 0})
    run.checkpoint = lambda: folder / "step_000001"
    run.phase_changed("update")
    run.log(1, {name: 0.0 for name in documented() if "[" not in name})
    text = exposition(run.snapshot(), "")[1].decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_rules_name_only_what_a_run_serves(tmp_path: Path) -> None:
    there = served(tmp_path)
    named = {name for rule in rules() for name in re.findall(r"\bmegarl_\w+", rule["expr"])}
    assert len(named) > 15
    assert named - there == set()
    assert {label for rule in rules() for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))} <= {
        *("run", "instance", "engine", "group", "state", "role", "guard", "rank", "node", "phase")
    }
    assert prometheus_name("kl/reference") in named


def test_every_rule_has_a_case_and_a_row_on_the_page() -> None:
    names = [rule["alert"] for rule in rules()]
    assert names == [*FIRES]
    page = (FOLDER.parents[1] / "docs" / "watching.md").read_text()
    assert re.findall(r"^\| `(Megarl\w+)`", page, re.M) == names


@needs_promtool
def test_promtool_takes_the_rules_and_the_config(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "monitoring")
    for kind, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        command = [str(PROMTOOL), "check", kind, str(tmp_path / "monitoring" / file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_when_it_should_and_none_while_all_is_well(tmp_path: Path) -> None:
    def test_of(series: dict[str, str], firing: list[str]) -> dict[str, Any]:
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        count = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "60m"}
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
        return {"interval": "1m", "input_series": inputs, "promql_expr_test": [{**count, "exp_samples": samples}]}

    tests = [test_of(series, [name]) for name, series in FIRES.items()] + [test_of(CALM, [])]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
