"""Whole runs on real Ray, megatron-core and SGLang: parity gates, the same curve in every layout, resuming, failing."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ray import cloudpickle

from megarl.config import Config
from megarl.errors import RewardError, WorkerError
from megarl.observe import read_metrics
from megarl.observe.report import page_data
from megarl.observe.run_record import read_run
from megarl.planning.roles import run_shape
from megarl.trainers.rl.train import train
from megarl.workers.group import WorkerGroup
from megarl.workers.roles import Roles
from tests.themes.e2e.processes import servers
from tests.themes.e2e.records import BY_ENGINES

TIMES = ("time/", "time_fraction/", "speed/", "eval/seconds", "memory/", "policy/tflops_per_gpu")
pytestmark = pytest.mark.usefixtures("local_ray")


def curve(config: Config) -> list[dict[str, float]]:
    """Metrics of every step without what depends on the clock and the process."""
    rows = read_metrics(Path(config.run_folder) / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows if row["step"]]


@pytest.fixture(scope="module")
def recording(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A place for recorded responses, filled by the first test that needs them."""
    return {"folder": tmp_path_factory.mktemp("recording")}


def recorded(recording: dict[str, Path], tiny_config: Callable[..., Config], **overrides: Any) -> Path:
    """The samples file of a GRPO run of six steps on one rank, made once."""
    if "samples" not in recording:
        config = tiny_config(**{"run.steps": 6, "run.folder": str(recording["folder"]), "data.eval": None, **overrides})
        train(config)
        recording["samples"] = Path(config.run_folder) / "samples.jsonl"
        recording["metrics"] = Path(config.run_folder) / "metrics.jsonl"
    return recording["samples"]


def test_a_run_on_sglang_passes_its_gates_and_leaves_everything_in_its_folder(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config(**{"rollout.engine": "sglang", "policy.layout": {"dp": 2}, "run.steps": 2, "rollout.temperature": 0.8})
    before = servers()
    summary = train(config)
    assert servers() <= before
    gates = summary["gates"]
    assert gates["kl_to_reference_at_first_step"] < 1e-9
    assert gates["log_prob_max_difference_as_loaded"] < 1e-4
    assert gates["log_prob_max_difference_after_sync"] < 1e-4
    folder = Path(config.run_folder)
    assert json.loads((folder / "summary.json").read_text())["gates"] == gates
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 16
    assert {version for s in samples if s["step"] == 2 for version in s["weight_versions"]} == {1}
    assert set(summary["phases"]) >= {"generate", "reward", "log_probs", "advantages", "update", "sync"}
    assert summary["eval"]["before"]["prompts"] == summary["eval"]["after"]["prompts"] == 8
    assert (folder / "checkpoints" / "step_000002" / "state.json").exists()
    placement = json.loads((folder / "placement.json").read_text())
    assert [rank["bundle"] for rank in placement["ranks"]["policy"]] == [0, 1]
    assert placement["engines"] == [placement["ranks"]["policy"][:1]]
    made = json.loads((folder / "machine.json").read_text())
    assert (made["gpus"], made["gpu"], made["machine"]) == (0, None, summary["machine"])
    assert not (folder / "end.json").exists()
    check_what_is_seen_of(config, ["driver", "policy 0", "policy 1"])


def check_what_is_seen_of(config: Config, processes: list[str]) -> None:
    """Every sample has the log-probs that the mismatch was measured with, and every process a timeline of every step."""
    run = read_run(config.run_folder)
    for row in run.metrics[-1:]:
        samples = [sample for sample in run.samples if sample["step"] == row["step"]]
        assert len(samples) == row["rollout/samples"]
        tokens = [
            (trainer, engine)
            for sample in samples
            for trainer, engine in zip(sample["training"]["log_probs"], sample["rollout_log_probs"], strict=True)
        ]
        assert max(abs(trainer - engine) for trainer, engine in tokens) == pytest.approx(row["mismatch/log_prob_max"], abs=1e-7)
        assert sum(sample["training"]["reward"] for sample in samples) / len(samples) == pytest.approx(row["reward/mean"])
        assert all(len(sample["training"]["advantages"]) == len(sample["response_ids"]) for sample in samples)
        text = ["".join(piece for piece in s["training"]["pieces"] if piece not in ("<unk>", "<eos>")) for s in samples]
        assert text == [sample["response_text"] for sample in samples]
    steps = list(range(1, config.run.steps + 1))
    assert [row["step"] for row in run.distributions] == steps
    assert sorted({row["step"] for row in run.trace}) == steps
    assert any(span[0] == "generate" for row in run.trace for span in row["spans"].get("engine 0", []))
    for who in processes:
        assert {row["step"] for row in run.trace if any(span[0] == "update" for span in row["spans"].get(who, []))} == set(
            steps
        )
    assert page_data([run])["runs"][0]["samples"]


# the test above with the other transport, which tests/rollout/test_sglang.py and test_sglang_killed.py check on servers
@pytest.mark.exhaustive
def test_weights_travel_by_process_group_too(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config(
        **{
            "rollout.engine": "sglang",
            "rollout.weight_transport": "process_group",
            "policy.layout": {"pp": 2},
            "data.eval": None,
        }
    )
    assert train(config)["gates"]["log_prob_max_difference_after_sync"] < 1e-4


@pytest.mark.exhaustive  # tests/options/transports/test_sglang_rdma.py has the transport, the test above but one the run
@pytest.mark.skipif(find_spec("nixl") is None, reason="needs NIXL: pip install 'megarl[rdma]'")
def test_engines_of_two_ranks_read_the_weights_of_two_stages_at_every_step(
    tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path
) -> None:
    wider = transformers.AutoConfig.from_pretrained(tiny_model, intermediate_size=128)  # which SGLang shares on a CPU unpadded
    transformers.AutoModelForCausalLM.from_config(wider, dtype=torch.float32).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    config = tiny_config(
        **{
            "model.path": str(tmp_path / "model"),
            "rollout.engine": "sglang",
            "rollout.tp": 2,
            "rollout.weight_transport": "rdma",
            "resources.placement": "separate",
            "policy.layout": {"pp": 2},
            "rollout.threads": 1,
            "run.steps": 3,
            "data.eval": None,
        }
    )
    summary = train(config)
    assert summary["gates"]["log_prob_max_difference_after_sync"] < 1e-4
    rows = read_metrics(Path(config.run_folder) / "metrics.jsonl")
    assert [row["rollout/weight_version"] for row in rows] == [0, 1, 2]
    assert max(row["mismatch/log_prob_max"] for row in rows) < 1e-4


@pytest.mark.parametrize(
    "layout",
    [
        # test_supervised.py's curves under dp2 and tests/themes/parallel's numbers under both stand for these
        pytest.param({"dp": 2}, id="dp2", marks=pytest.mark.exhaustive),
        pytest.param({"tp": 2, "sequence_parallel": True}, id="tp2+sp", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2}, id="pp2"),
        pytest.param({"cp": 2}, id="cp2", marks=pytest.mark.exhaustive),
    ],
)
def test_every_policy_layout_gives_the_same_curve(
    tiny_config: Callable[..., Config], recording: dict[str, Path], layout: dict[str, Any]
) -> None:
    samples = recorded(recording, tiny_config)
    replay = {"rollout.engine": "replay", "rollout.replay_from": str(samples), "run.steps": 6, "data.eval": None}
    config = tiny_config(**replay, **{"policy.layout": layout, "run.name": "layout"})
    train(config)
    told = (*TIMES, *BY_ENGINES)
    expected = [{k: v for k, v in row.items() if not k.startswith(told)} for row in read_metrics(recording["metrics"])]
    rows = curve(config)
    assert len(rows) == len(expected) == 6
    for row, reference in zip(rows, expected, strict=True):
        assert row.keys() == reference.keys()
        for name, value in reference.items():
            assert row[name] == pytest.approx(value, abs=1e-4), name


@pytest.mark.exhaustive  # test_resume.py compares a run with more to remember, and its checkpoints too
def test_three_steps_and_three_resumed_equal_six_bit_for_bit(
    tiny_config: Callable[..., Config], recording: dict[str, Path]
) -> None:
    samples = recorded(recording, tiny_config)
    replay = {"rollout.engine": "replay", "rollout.replay_from": str(samples), "data.eval": None, "policy.layout": {"dp": 2}}
    whole = tiny_config(**replay, **{"run.steps": 6, "run.name": "whole"})
    train(whole)
    # the schedule must not know where the run will stop, so the first part is cut short by its number of steps alone
    parts = {"run.name": "parts", "run.resume": "auto"}
    train(tiny_config(**replay, **parts, **{"run.steps": 3}))
    resumed = tiny_config(**replay, **parts, **{"run.steps": 6})
    train(resumed)
    for part, reference in zip(curve(resumed), curve(whole), strict=True):
        assert part == reference


@pytest.mark.parametrize("kl", [0.0, 0.04])
def test_a_run_loads_the_models_that_its_plan_counts_and_no_others(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, kl: float
) -> None:
    loaded: list[str] = []
    load = Roles.load
    monkeypatch.setattr(Roles, "load", lambda roles, name: (loaded.append(name), load(roles, name)))
    config = tiny_config(**{"algorithm": {"name": "grpo", "kl": {"coef": kl}}, "run.steps": 1, "data.eval": None})
    gates = train(config)["gates"]
    assert loaded == [role.name for role in run_shape(config).roles] == ["policy", "reference"][: 1 + (kl > 0)]
    assert ("kl_to_reference_at_first_step" in gates) == (kl > 0)
    assert gates["log_prob_max_difference_as_loaded"] < 1e-4, (
        "the engine's copy of the folder is what the policy is compared with"
    )


def test_a_run_whose_ranks_are_called_by_node_computes_the_same(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"policy.layout": {"dp": 2}, "run.steps": 2, "data.eval": None}
    by_rank = tiny_config(**settings, **{"run.name": "by_rank"})
    train(by_rank)
    calls: list[int] = []
    submit = WorkerGroup.submit
    monkeypatch.setattr(WorkerGroup, "submit", lambda group, *call: (calls.append(len(group.nodes)), submit(group, *call))[1])
    monkeypatch.setattr("megarl.workers.cluster.DIRECT_RANKS", 0)
    by_node = tiny_config(**settings, **{"run.name": "by_node"})
    train(by_node)
    assert set(calls) == {1}, "both ranks are on one node"
    assert curve(by_node) == curve(by_rank)


def test_ppo_with_a_critic_of_its_own_layout_runs_and_resumes(tiny_config: Callable[..., Config]) -> None:
    settings = {
        "algorithm": {"name": "ppo", "mini_batches": 2, "epochs": 2},
        "policy.layout": {"dp": 2},
        "critic.layout": {"tp": 2},
        "run.resume": "auto",
        "data.eval": None,
    }
    assert train(tiny_config(**settings, **{"run.steps": 1}))["gates"]["kl_to_reference_at_first_step"] < 1e-9
    config = tiny_config(**settings)  # two steps
    train(config)
    rows = curve(config)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["critic/grad_norm"] > 0 and row["policy/grad_norm"] > 0 for row in rows)
    check_what_is_seen_of(config, ["driver", "policy 0", "policy 1", "critic 0", "critic 1"])


# test_bad_input.py's rewards that fail, and servers that ended after the first test of this file, stand for it
@pytest.mark.exhaustive
def test_a_reward_that_raises_ends_the_run_with_its_sentence_and_no_process_left(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text("def reward(samples):\n    raise ValueError('no such thing')\n")
    settings = {"rollout.engine": "sglang", "data.eval": None}
    config = tiny_config(**settings, **{"rewards": [{"name": f"{tmp_path / 'bad.py'}:reward"}]})
    before = servers()
    with pytest.raises(RewardError, match="no such thing"):
        train(config)
    assert servers() <= before
    assert not (Path(config.run_folder) / "checkpoints").exists()


def test_an_exception_in_a_rank_reaches_the_driver_with_its_traceback(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __call__(self, output: Any, stream: Any) -> Any:
            raise ZeroDivisionError("broken on purpose")

    import tests.themes.e2e.test_runs as here

    cloudpickle.register_pickle_by_value(here)
    monkeypatch.setattr("megarl.experience.losses_of_config.PolicyObjective", lambda *a, **k: Broken())
    config = tiny_config(**{"policy.layout": {"dp": 2}, "data.eval": None})
    with pytest.raises(WorkerError, match="broken on purpose") as raised:
        train(config)
    assert "in __call__" in str(raised.value)
    assert "policy" in str(raised.value)
