"""A rehearsal shows every process where the placement has it, among its neighbours; its small run has layouts that divide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megarl import cli
from megarl.config import Config, load_any, load_config
from megarl.data.row_media import open_media
from megarl.data.tokenize import load_tokenizer
from megarl.launch import rehearse, small_run
from megarl.models.check_layouts import check_models
from megarl.models.shape import ModelShape
from megarl.option_list import OPTIONS
from megarl.options.distillation.run import Teachers
from megarl.planning.parameters import stage_parameters
from megarl.weights.placement import PlacementRequest, place, planned_bundles
from megarl.weights.run_plan import plan_of_run
from megarl.weights.verify import verify
from tests.example_plans import PLANS

ROOT = Path(__file__).parents[2]
BY_GROUP = "rollout.weight_transport=process_group"
CONFIG = """
model: {path: MODELS/llama-3.1-8b}
policy: {layout: {tp: 2, pp: 2}}
data: {train: {source: jsonl, path: rows.jsonl}}
rollout: {engines: 1, tp: 4}
rewards: [{name: exact_number}]
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    Path("c.yaml").write_text(CONFIG.replace("MODELS", str(ROOT / "examples" / "models")))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What the command prints as JSON."""
    assert cli.main(["rehearse", "c.yaml", "--placement-only", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_process_is_shown_with_its_gpus_and_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--gpus-per-node=2", BY_GROUP)
    assert [
        (one["process"], one["node"], one["gpu"], one["groups"]) for one in found["processes"] if "gpu" in one
    ] == [
        ("policy 0", "node 0", 0, {"tp": [0, 1], "pp": [0, 2]}),
        ("policy 1", "node 0", 1, {"tp": [0, 1], "pp": [1, 3]}),
        ("policy 2", "node 1", 0, {"tp": [2, 3], "pp": [0, 2]}),
        ("policy 3", "node 1", 1, {"tp": [2, 3], "pp": [1, 3]}),
    ]  # fmt: skip
    engines = [one for one in found["processes"] if "gpus" in one]
    assert [(one["process"], one["node"], one["gpus"], one["base_gpu_id"]) for one in engines] == [
        ("engine 0, node 0", "node 0", [0, 1], 0), ("engine 0, node 1", "node 1", [0, 1], 0)
    ]  # fmt: skip
    assert [(one["nnodes"], one["node_rank"]) for one in engines] == [(2, 0), (2, 1)]
    whole = 2 * 8_030_261_248  # each rank holds a quarter and sends it once
    assert found["weights"]["bytes_sent"] == pytest.approx([whole / 4] * 2, rel=1e-2)
    assert found["steps"] is None


def test_on_one_node_nothing_is_relayed_and_process_groups_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bytes_by_relays" not in said(capsys, "--gpus-per-node=4")["weights"]
    found = said(capsys, BY_GROUP, "resources.placement=separate")["weights"]
    assert found["communicators"] == {"of_a_training_rank": [1, 1], "of_an_engine_rank": 1, "members": 8}


LARGEST = "deepseek-v3-grpo-2048xh100"
"""Ten seconds of a core; the same model is placed on 512 GPUs, too."""


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=plan.stem, marks=pytest.mark.exhaustive if plan.stem == LARGEST else ()) for plan in PLANS],
)
def test_every_example_plan_is_placed_and_its_small_run_has_a_model_that_the_layouts_divide(
    plan: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_any(plan)
    request = PlacementRequest.of(config)
    placement = place(request, planned_bundles(request.bundles, 8))
    found = rehearse.processes(config, placement)
    ranks = sum(layout.world_size for layout in config.layouts.values())
    of_config = 0 if config.sampling is None else config.sampling.engines
    engines = sum(len(placement.engine_nodes(engine)) for engine in range(of_config))
    assert len(found) == ranks + engines
    for one in found:  # a tensor-parallel group is on one node
        group, _, rank = one["process"].partition(" ")
        nodes = {placement.bundles[placement.ranks[group][member]].node for member in one.get("groups", {}).get("tp", [])}
        assert nodes <= {one["node"]}, rank

    def written(folder: Path, hf_config: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(hf_config))

    monkeypatch.setattr(small_run, "_write_model", written)
    small = small_run.small_run(config, tmp_path / "small", "here")
    check_models(small)
    for name, layout in config.layouts.items():
        assert small.layouts[name].world_size == layout.world_size
    assert isinstance(small, Config) == isinstance(config, Config)
    if isinstance(small, Config) and isinstance(config, Config):  # a run on given responses has no engines
        assert verify(plan_of_run(small)).slices > 0
        assert (small.rollout.engines, small.rollout.tp) == (config.rollout.engines, config.rollout.tp)


def test_a_batch_job_is_rehearsed_on_its_own_nodes_and_not_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearse, "MOST_PROCESSES", 0)
    assert cli.main(["submit", "slurm", "c.yaml", "--gpus-per-node=2", "--time=01:00:00", "--rehearse", BY_GROUP]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 nodes with 2 GPUs each; by node: policy 0-1, engines 0-1" in out
    assert "engine 0, node 1 node 1 0-1 node 1 of 2" in out
    assert "no steps were made: the run has 8 ranks of roles and engines, and a rehearsal starts at most 0; " in out


def test_steps_whose_responses_are_of_older_weights_are_no_difference_of_trainer_and_engines() -> None:
    steps = [{"mismatch/log_prob_max": 1e-6, "staleness/max": 0.0}, {"mismatch/log_prob_max": 0.3, "staleness/max": 1.0}]
    assert rehearse.largest_difference(steps) == 1e-6
    assert rehearse.largest_difference([{"mismatch/log_prob_max": 0.3}, *steps]) == 0.3, "a run that has no staleness"
    assert rehearse.largest_difference(steps[1:]) is None


def test_what_cannot_be_placed_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        (["--gpus-per-node=0"], "--gpus-per-node is 0; it must be a whole number above 0"),
        (["--gpus-per-node=1"], "policy.layout.tp is 2, which is more than the 1 GPUs of a node"),
    ):
        assert cli.main(["rehearse", "c.yaml", "--placement-only", *arguments]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("heads", [9, 3, 8])
def test_the_small_model_is_one_that_transformers_builds_whatever_its_heads(tmp_path: Path, heads: int) -> None:
    """SmolLM2 has nine, which do not divide the width of the small model."""
    hf_config = json.loads((ROOT / "examples/models/llama-3.1-8b/config.json").read_text())
    hf_config |= {"num_attention_heads": heads, "num_key_value_heads": 1 if heads != 9 else 3, "head_dim": 64}
    hf_config |= {"hidden_size": 64 * heads}
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text(json.dumps(hf_config))
    config = load_config("c.yaml", [f"model.path={tmp_path / 'odd'}", "policy.layout={}", "rollout.tp=1"])
    small = small_run.small_run(config, tmp_path / "small", "here")
    weight = load_file(tmp_path / "small/model/model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert weight.shape == (16 * heads, 64 if heads == 8 else 16 * heads)
    check_models(small)


def test_the_small_run_has_every_teacher_in_its_layout_and_compares_tokens_that_its_model_has(tmp_path: Path) -> None:
    named = "teacher.named=[{name: math, path: elsewhere, layout: {tp: 2}}, {name: code, path: elsewhere}]"
    distillation = "algorithm.distillation={apply_to: loss, top_k: 500}"
    model = f"model.path={ROOT}/examples/models/llama-3.1-8b"
    config = load_config("c.yaml", [model, "algorithm.name=opd", distillation, named])
    small = small_run.small_run(config, tmp_path / "small", "here")
    assert [role.name for role in small.roles] == ["policy", "teacher", "teacher_math", "teacher_code"]
    assert small.layouts["teacher_math"].tp == 2
    check_models(small)
    Teachers(small).check(load_tokenizer(small.model.path), [])


@pytest.mark.skipif("pictures" not in OPTIONS, reason="needs the option pictures")
@pytest.mark.parametrize("model", ["qwen2-vl-2b", "qwen2.5-vl-3b", "qwen3-vl-30b-a3b"])
def test_the_small_model_of_one_that_sees_is_a_whole_folder_with_a_tower(model: str, tmp_path: Path) -> None:
    layout = "{tp: 2, pp: 3, first_stage_layers: 1, last_stage_layers: 1, dp: 2, ep: EP, sequence_parallel: true}"
    layout = layout.replace("EP", "2" if "a3b" in model else "1").replace("_layers: 1", "_layers: 4")
    config = load_config("c.yaml", [f"model.path={ROOT}/examples/models/{model}", f"policy.layout={layout}", "rollout.tp=2"])
    small = small_run.small_run(config, tmp_path / "small", "here")
    check_models(small)
    folder = small.model.path
    pictures = open_media(small.data, folder, load_tokenizer(folder), tmp_path)
    assert pictures.model is not None
    shape = ModelShape.read(folder)
    assert shape.vision is not None
    stages = stage_parameters(shape, small.policy.layout)
    of_tower = sum(tensor.numel() for name, tensor in load_file(f"{folder}/model.safetensors").items() if "visual." in name)
    assert [stage.tower for stage in stages] == [of_tower, 0, 0]
