"""Rehearsals: runs made small on a Ray of several nodes that say they have GPUs, with real ranks and real SGLang engines.

They need 8 GB, and Ray ends processes at 95 % of the machine's memory: `make test` runs them when all other tests have ended.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml

from megarl.cli import main
from megarl.launch import rehearse
from megarl.observe import read_metrics
from tests.themes.engine_killer import write_killer
from tests.themes.multinode.rehearsal import changed

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "examples" / "models"


def rehearsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, gpus_per_node: int, **sections: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `megarl rehearse` prints of such a run, and its metrics."""
    ray.shutdown()  # that of the session has no GPUs
    tree = {
        "run": {"name": "run", "folder": str(tmp_path)},
        "model": {"path": str(MODELS / model)},
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
        "rewards": [{"name": "exact_number"}],
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree | sections))
    assert main(["rehearse", str(tmp_path / "c.yaml"), f"--gpus-per-node={gpus_per_node}", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{\n") :])
    return found, list(read_metrics(Path(found["steps"]["folder"]) / "metrics.jsonl"))


# tests/themes/multinode, of which CI runs this part, kills one over two machines, and "an engine over both nodes" below has
# such an engine
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.real
def test_a_pipeline_over_two_nodes_and_an_engine_over_both_whose_second_process_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed engine is restarted on both nodes, given the weights again, and the run makes all of its steps."""
    reward, killed = write_killer(tmp_path, tmp_path / "run" / "rehearsal" / "model")
    small_run = rehearse.small_run
    monkeypatch.setattr(rehearse, "small_run", lambda *given: changed(small_run(*given), 3, reward))
    found, rows = rehearsed(
        tmp_path, capsys, "llama-3.1-8b", 2, policy={"layout": {"tp": 2, "pp": 2}}, rollout={"engines": 1, "tp": 4}
    )
    assert not psutil.pid_exists(int(killed.read_text()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert found["steps"]["log_prob_difference"] < 1e-4
    run = Path(found["steps"]["folder"])
    placed = json.loads((run / "placement.json").read_text())
    assert [[place["gpu"] for place in places] for places in placed["engines"]] == [[0, 1, 0, 1]]
    assert len({place["node"] for place in placed["engines"][0]}) == 2
    for group in ([0, 1], [2, 3]):  # tensor-parallel pairs
        assert len({placed["ranks"]["policy"][rank]["node"] for rank in group}) == 1
    servers = found["steps"]["servers"]
    assert servers.keys() == {"engine-0", "engine-0-node-1"}
    assert [server["node-rank"] for server in servers.values()] == ["0", "1"]
    assert len({server["dist-init-addr"] for server in servers.values()}) == 1
    assert (run / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("model", "size", "sections"),
    [
        pytest.param("llama-3.1-8b", 2, {
            "policy": {"layout": {"tp": 2, "pp": 2}}, "rollout": {"engines": 1, "tp": 4, "prompts_per_step": 4},
        }, id="an engine over both nodes"),
        pytest.param("qwen3-235b-a22b", 2, {
            "policy": {"layout": {"tp": 2, "dp": 2, "ep": 4, "sequence_parallel": True}},
            "rollout": {"engines": 1, "tp": 4, "engine_args": {"ep_size": 2}, "prompts_per_step": 4},
        }, id="experts over two nodes", marks=pytest.mark.exhaustive),
        pytest.param("llama-3.1-8b", 4, {
            "policy": {"layout": {"tp": 2, "pp": 2}}, "rollout": {"engines": 2, "tp": 2, "weight_transport": "process_group"},
            "resources": {"placement": "separate"},
        }, id="separate, by process groups", marks=pytest.mark.exhaustive),
        pytest.param("qwen3-32b", 4, {
            "policy": {"layout": {"dp": 4}}, "rollout": {"engines": 4, "prompts_per_step": 4},
        }, id="an engine for each rank", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_other_runs_make_their_steps_and_engines_agree_with_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, size: int, sections: dict[str, Any]
) -> None:
    found, rows = rehearsed(tmp_path, capsys, model, size, **sections)
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert found["steps"]["log_prob_difference"] < 1e-4
    placed = json.loads((Path(found["steps"]["folder"]) / "placement.json").read_text())
    ranks = sections["rollout"].get("tp", 1)
    for places in placed["engines"]:
        assert len({place["node"] for place in places}) == max(1, ranks // size)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("objective", "layout", "reference"),
    [
        ("dpo", {"dp": 2}, None),
        pytest.param("dpo", {"tp": 2, "pp": 2}, {"tp": 2}, marks=pytest.mark.exhaustive),
        pytest.param("process_reward_model", {"tp": 2, "pp": 2}, None, marks=pytest.mark.exhaustive),
    ],
)
def test_runs_on_given_responses_make_their_steps(
    tmp_path: Path, objective: str, layout: dict[str, int], reference: dict[str, int] | None
) -> None:
    """On a Ray of nodes with one GPU for each tensor-parallel rank; the reference is with the policy, or has its own ranks."""
    ray.shutdown()
    tree: dict[str, Any] = {
        "run": {"name": "run", "folder": str(tmp_path)},
        "model": {"path": str(MODELS / "llama-3.1-8b")},
        "policy": {"layout": layout},
        "reference": {"layout": reference},
        "objective": {"name": objective},
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    assert main(["rehearse", str(tmp_path / "c.yaml"), f"--gpus-per-node={layout.get('tp', 1)}"]) == 0
    made = tmp_path / "run" / "rehearsal" / "run"
    rows = list(read_metrics(made / "metrics.jsonl"))
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    placed = json.loads((made / "placement.json").read_text())
    assert len(placed["nodes"]) == 2
    assert placed["ranks"].keys() == ({"policy", "reference"} if reference else {"policy"})
