"""Checkpoints in the nodes' memory as `megarl plan` has them: against sums made by hand, and files that ranks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.config import load_config
from megarl.config.layout import Layout
from megarl.config.sections import PolicyConfig
from megarl.models.shape import ModelShape
from megarl.options.elastic.copies_plan import CopiesPlan, copies_of
from megarl.options.elastic.times import node_refusal, stated, times_as_json
from megarl.planning.gpus import gpu_named
from megarl.planning.memory import checkpoint_bytes
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.roles import PlannedRole
from tests.world import World

OF_8B = 8_030_261_248
CONFIG = "tests/planning/plans/llama-3.1-8b-grpo-8xh100.yaml"
TWO_NODES = ("policy.layout={dp: 16}", "rollout.engines=16", "rollout.tp=1")


def planned(*overrides: str, gpu: str = "h200") -> CapacityPlan:
    return make_plan(load_config(CONFIG, ["resources.spares=0", *overrides]), gpu_named(gpu))


def copies(*overrides: str) -> CopiesPlan:
    found = copies_of(planned(*overrides))
    assert found is not None
    return found


def test_a_single_node_has_two_checkpoints_of_its_own_and_sends_nothing() -> None:
    found = copies("policy.layout={dp: 8}")
    assert (found.own, found.buddys, found.sent) == (14 * OF_8B, 0.0, 0.0)
    assert found.shared_memory == 2 * 14 * OF_8B
    assert found.copy_s == pytest.approx(14 * OF_8B / 8 / (64e9 * 0.7))


def test_each_of_two_nodes_has_its_half_and_the_others_half_twice_and_sends_its_own_once() -> None:
    plan, found = planned(*TWO_NODES), copies(*TWO_NODES)
    assert (found.nodes, found.own, found.buddys, found.sent) == (2, 7 * OF_8B, 7 * OF_8B, 7 * OF_8B)
    assert found.shared_memory == 2 * (7 + 7) * OF_8B
    assert found.main_memory == plan.memory.host_bytes_of_a_node + (2 + 2) * 7 * OF_8B
    assert found.send_s == pytest.approx(7 * OF_8B / (50e9 * 0.7))
    told = times_as_json(plan)["memory_checkpoints"]
    assert told["network_share_of_step"] == pytest.approx(found.send_s / plan.times.step_seconds)
    assert told["shared_memory_bytes_of_a_node"] == found.shared_memory


def test_a_reference_that_moves_is_the_first_replicas_part() -> None:
    moved = copies(*TWO_NODES, "reference.reset_every=1")
    averaged = copies(*TWO_NODES, "reference.reset_every=1", "reference.reset_share=0.1")
    assert (moved.own, moved.buddys) == ((7 + 2) * OF_8B, 7 * OF_8B)
    assert averaged.own == (7 + 4) * OF_8B


def test_a_run_without_spares_says_nothing() -> None:
    plan = make_plan(load_config(CONFIG), gpu_named("h200"))
    assert (copies_of(plan), stated(plan), times_as_json(plan), node_refusal(plan)) == (None, [], {}, None)


@pytest.fixture
def gpu_with(tmp_path: Path) -> Any:
    def made(node_memory_gb: float) -> str:
        path = tmp_path / "ours.yaml"
        path.write_text(f"like: h200\nnode_memory_gb: {node_memory_gb}\n")
        return str(path)

    return made


def test_nodes_that_do_not_hold_the_checkpoints_are_refused_in_one_sentence(
    gpu_with: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = copies(*TWO_NODES).main_memory / 1e9
    command = ["plan", CONFIG, "resources.spares=0", *TWO_NODES, "--gpu"]
    assert cli.main([*command, gpu_with(needed * 0.99)]) == 2
    error = capsys.readouterr().err
    assert "resources.spares keeps 225 GB of checkpoints in /dev/shm of a node, with which it would hold" in error
    assert f"but node_memory_gb of ours is {needed * 0.99:,g}; use more nodes, or set resources.spares to null" in error
    assert error.count("\n") == 1
    assert cli.main([*command, gpu_with(needed * 1.01), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["times"]["memory_checkpoints"]["checkpoints"] == 2


def test_the_plan_says_what_is_kept_sent_and_waited_for(gpu_with: Any) -> None:
    one, two = stated(planned("policy.layout={dp: 8}")), stated(planned(*TWO_NODES))
    assert one[0].startswith("Memory checkpoints take 225 GB of /dev/shm of a node: 2 of its ranks (112 GB each); ranks wait")
    assert one[1] == "Warning: with one node there is no buddy; when the node is lost, the run starts again from disk"
    assert "2 of its ranks (56.2 GB each) and of a buddy's (56.2 GB)" in two[0]
    assert two[1].startswith("After each step a node sends 56.2 GB to its buddy, beside the next step: 1.6 s at 35 GB/s")
    assert any("more than half" in line for line in stated(planned(*TWO_NODES, gpu=gpu_with(440.0))))
    assert not any("more than half" in line for line in stated(planned(*TWO_NODES, gpu=gpu_with(460.0))))


MODEL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1024}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(**MODEL, num_key_value_heads=2, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write(rank: int, world_size: int, path: str, layout: Layout, dtype: str, freeze: tuple[str, ...], folder: str) -> int:
    """Write a rank's part; bytes of what `check_room` counts."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.options.elastic.rank_memory import KeepInMemory, NodeFolder, bytes_in_memory

    initialize_layout(layout, seed=1)
    role = RankModel(ModelOptions(path, layout, dtype=dtype, freeze=freeze), OptimizerOptions(lr=1e-3))
    KeepInMemory("policy", "0", NodeFolder(Path(folder), None))(role)
    return bytes_in_memory(role)


@pytest.mark.parametrize(
    ("layout", "dtype", "freeze"),
    [
        (Layout(), "bfloat16", ()),
        (Layout(dp=2), "float32", ()),
        (Layout(dp=2), "bfloat16", ("*.layers.0.*",)),
        (Layout(pp=2), "bfloat16", ()),
        (Layout(tp=2), "bfloat16", ()),
    ],
    ids=["one", "dp2 in float32", "dp2 and frozen", "pp2", "tp2"],
)
def test_planned_bytes_are_those_of_the_files_that_ranks_write(
    world: World, model: Path, tmp_path: Path, layout: Layout, dtype: str, freeze: tuple[str, ...]
) -> None:
    """But for the heads of tensors and what is no tensor, less than 2 % here and nothing of a large model."""
    counted = world.call(write, str(model), layout, dtype, freeze, str(tmp_path), size=layout.world_size)
    role = PlannedRole("policy", "policy", ModelShape.read(str(model)), layout, False, PolicyConfig(freeze=freeze), 512, None)
    itemsize = 2 if dtype == "bfloat16" else 4
    expected = sum(checkpoint_bytes(role, layout.coords(rank).pp, itemsize) for rank in range(layout.world_size))
    files = {int(path.name.split("_")[2]): path.stat().st_size for path in tmp_path.rglob("*.distcp")}
    assert sum(counted) == pytest.approx(expected, rel=3e-3)
    assert expected <= sum(files.values()) * 1.003
    assert sum(files.values()) == pytest.approx(expected, rel=0.02)
    if layout.tp == 1 and not freeze:
        for rank, size in files.items():
            assert size == pytest.approx(checkpoint_bytes(role, layout.coords(rank).pp, itemsize), rel=0.03), rank
