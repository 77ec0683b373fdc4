"""What a whole run holds on each GPU: roles that share it, engines, main memory; against sums made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import load_config
from megarl.config.layout import Layout
from megarl.models.shape import ModelShape
from megarl.planning.activations import Precision, layer_activations
from megarl.planning.gpus import gpu_named
from megarl.planning.memory import GpuMemory
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.turns import (
    ALL_AT_ONCE,
    ASLEEP_BYTES,
    GENERATING,
    RESERVE_BYTES,
    RESIDENT,
    TRAINING,
    UPDATING,
    bytes_beside_engines,
)
from megarl.rollout.engines.sglang import server

OF_8B = 8_030_261_248
ONE = ["policy.layout={dp: 1}", "rollout.engines=1", "rollout.tp=1"]
AT_ONCE = "rollout.engine_args={enable_memory_saver: false}"


def planned(*overrides: str, name: str = "tests/planning/plans/llama-3.1-8b-grpo-8xh100", gpu: str = "h200") -> CapacityPlan:
    return make_plan(load_config(f"{name}.yaml", overrides), gpu_named(gpu))


def owners(gpu: GpuMemory) -> set[str]:
    return {owner for owner, _ in gpu.parts}


def test_one_gpu_holds_every_role_whole_and_the_weights_twice() -> None:
    parts = planned(*ONE, AT_ONCE).memory.worst.parts
    assert parts["policy", "parameters"] == parts["reference", "parameters"] == 2 * OF_8B
    assert parts["engine", "parameters"] == pytest.approx(2 * OF_8B, rel=1e-3)
    assert parts["policy", "gradients"] == 4 * OF_8B
    assert parts["policy", "optimizer"] == 12 * OF_8B
    assert parts["process", "contexts"] == 2e9


def test_a_reference_that_is_a_moving_average_has_two_bytes_a_weight_more() -> None:
    averaged = ["reference.reset_every=1", "reference.reset_share=0.1"]
    parts = planned(*ONE, AT_ONCE, *averaged).memory.worst.parts
    assert parts["reference", "parameters"] == parts["reference", "optimizer"] == 2 * OF_8B
    assert ("reference", "optimizer") not in planned(*ONE, AT_ONCE, averaged[0]).memory.worst.parts
    in_float32 = planned(*ONE, AT_ONCE, *averaged, "model.dtype=float32").memory.worst.parts
    assert ("reference", "optimizer") not in in_float32


def test_data_parallel_ranks_share_the_optimizer_and_nothing_else() -> None:
    parts = planned("policy.layout={dp: 8}").memory.worst.turns[TRAINING]
    assert parts["policy", "optimizer"] == 12 * OF_8B / 8
    assert parts["policy", "parameters"] == 2 * OF_8B


def test_an_offloaded_optimizer_is_in_main_memory() -> None:
    memory = planned("policy.layout={dp: 8}", "policy.optimizer.offload_fraction=1", AT_ONCE).memory
    assert ("policy", "optimizer") not in memory.worst.parts
    assert memory.host_bytes_of_a_node == (16 + 14) * OF_8B  # and the copy that checkpoints are written from


def test_trainer_and_engines_that_take_turns_need_room_for_the_fullest_turn() -> None:
    plan = planned("policy.layout={dp: 8}")
    turns = plan.memory.worst.turns
    assert list(turns) == [TRAINING, UPDATING, GENERATING]
    training, updating, generating = (sum(turns[turn].values()) for turn in turns)
    assert plan.memory.worst.total == max(training, generating) > updating
    engine = {name: size for name, size in turns[GENERATING].items() if name[0] == "engine"}
    assert engine["engine", "parameters"] == pytest.approx(2 * OF_8B, rel=1e-3)
    assert turns[GENERATING] == engine | {("process", "contexts"): 2e9}
    sent = {("policy", "parameters"): 2 * OF_8B, ("policy", "staging"): 2 * 2**30}
    asleep = {("process", "contexts"): 1e9, ("engine", "asleep"): 1.9e9}
    assert turns[UPDATING] == sent | asleep | {("engine", "parameters"): engine["engine", "parameters"]}
    kept = {("engine", "asleep"): ASLEEP_BYTES, ("process", "contexts"): 1e9}
    assert turns[TRAINING].items() >= kept.items()
    assert {name: size for name, size in turns[TRAINING].items() if name[1] in ("parameters", "gradients", "optimizer")} == {
        ("policy", "parameters"): 2 * OF_8B,
        ("policy", "gradients"): 4 * OF_8B,
        ("policy", "optimizer"): 12 * OF_8B / 8,
        ("reference", "parameters"): 2 * OF_8B,
    }
    at_once = planned("policy.layout={dp: 8}", AT_ONCE).memory
    assert list(at_once.worst.turns) == [ALL_AT_ONCE]
    assert at_once.worst.total > max(training, updating)
    assert plan.memory.host_bytes_of_a_node - at_once.host_bytes_of_a_node == 8 * (2 + 2 + 12 / 8) * OF_8B


@pytest.mark.parametrize("kl", [0.0, 0.04])
def test_what_is_counted_in_each_turn_is_what_the_run_keeps_then(kl: float) -> None:
    """`RESIDENT` is what `workers/gpu_sharing.py` keeps to; the roles are those that a run is able to load."""
    from megarl.workers.role_specs import role_specs

    plan = planned("policy.layout={dp: 8}", f"algorithm.kl={{coef: {kl}}}")
    trainer = {role.name for role in plan.run.roles}
    assert trainer == role_specs(plan.run.config).keys() == {"policy"} | ({"reference"} if kl else set())
    turns = plan.memory.worst.turns
    assert turns.keys() == RESIDENT.keys() - {ALL_AT_ONCE}
    for turn, parts in turns.items():
        there = RESIDENT[turn]
        held = {owner for owner, part in parts if part == "parameters" and owner != "engine"}
        assert held == {"all": trainer, "policy": {"policy"}, "none": set()}[there.trainer]
        assert (("engine", "parameters") in parts) == (there.engine != "none")
        assert (("engine", "KV cache") in parts) == (there.engine == "all") != (("engine", "asleep") in parts)
        assert (("policy", "staging") in parts) == there.sends


def test_ranks_keep_no_fp8_copies_and_no_other_role_while_engines_are_awake() -> None:
    plan = planned("model.fp8_param=false", name="examples/plans/llama-3.1-405b-ppo-1024xh200-fp8")
    updating, training = (plan.memory.worst.turns[turn] for turn in (UPDATING, TRAINING))
    assert {owner for owner, _ in updating} == {"policy", "engine", "process"}
    assert updating["policy", "parameters"] < 0.6 * training["policy", "parameters"]


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_engines_are_planned_with_the_share_of_a_gpu_that_they_are_started_with(gpu: str) -> None:
    """As many samples as no cache has room for, so that all of the share is filled."""
    plan = planned("policy.layout={dp: 8}", "rollout.prompts_per_step=4096", gpu=gpu)
    total, beside = round(plan.gpu.memory_gb * 1e9), bytes_beside_engines(plan.run.config)
    assert RESERVE_BYTES == server.WORKING_BYTES
    taken = sum(size for name, size in plan.memory.worst.turns[GENERATING].items() if name[1] in ("parameters", "KV cache"))
    assert taken == pytest.approx(server.static_fraction(total, beside) * total, rel=1e-3)
    assert sum(plan.memory.worst.turns[UPDATING].values()) <= plan.memory.usable


def test_a_policy_that_leaves_an_engine_no_room_does_not_fit() -> None:
    memory = planned(
        "policy.layout={tp: 8, dp: 1}", "rollout.tp=4", gpu="h100", name="examples/plans/llama-3.1-70b-ppo-128xh200"
    ).memory
    assert sum(memory.worst.turns[UPDATING].values()) < memory.usable
    memory = planned(
        "policy.layout={tp: 4, dp: 1}", "rollout.tp=2", gpu="h100", name="examples/plans/llama-3.1-70b-ppo-128xh200"
    ).memory
    assert sum(memory.worst.turns[UPDATING].values()) > memory.usable


def test_separate_roles_and_engines_have_gpus_of_their_own() -> None:
    plan = planned("resources.placement=separate", "algorithm.name=ppo")
    assert plan.run.gpus == 8 + 1 + 8
    assert [owners(gpu) - {"process"} for gpu in plan.memory.gpus] == [{"policy", "reference"}, {"critic"}, {"engine"}]
    assert [gpu.count for gpu in plan.memory.gpus] == [8, 1, 8]


def test_buffers_are_for_weights_that_are_read_from_them() -> None:
    apart = ["policy.layout={dp: 8}", "resources.placement=separate"]
    assert planned(*apart).memory.worst.parts["policy", "staging"] == 5 * 2**30  # relays send, receive, have the last received
    apart = ["policy.layout={dp: 4}", "rollout.engines=4", "rollout.tp=1", *apart[1:]]
    assert planned(*apart).memory.gpus[0].parts["policy", "staging"] == 2 * 2**30
    assert planned(*apart, gpu="cpu").memory.gpus[0].parts["policy", "staging"] == 2 * 128 * 2**20
    assert ("policy", "staging") not in planned(*apart, "rollout.weight_transport=process_group").memory.worst.parts


def test_weights_in_fp8_are_unpacked_where_they_are_sent_from_their_places() -> None:
    sent = ["resources.placement=separate", "rollout.weight_transport=process_group"]
    memory = planned(*sent, name="examples/plans/llama-3.1-405b-ppo-1024xh200-fp8").memory
    (policy,) = (gpu for gpu in memory.gpus if gpu.first == 128)
    assert policy.parts["policy", "staging"] == pytest.approx(policy.parts["policy", "parameters"], rel=1e-4)


def test_processes_of_one_gpu_add_up_and_roles_of_one_process_take_turns() -> None:
    parts = planned(name="examples/plans/llama-3.1-70b-ppo-128xh200").memory.worst.parts
    assert parts["critic", "activations"] > 0
    assert parts["policy", "activations"] > 0
    assert ("reference", "communication") not in parts


def test_the_cache_is_what_the_config_says_or_what_a_step_fills() -> None:
    assert planned().run.engines is not None
    cache = planned("rollout.engine_args={max_total_tokens: 100000}").memory.worst.most["engine", "KV cache"]
    assert cache == 100_000 * 32 * 2 * 8 * 128 * 2  # layers, keys and values, KV heads, head dimension, bytes
    split = planned("rollout.engine_args={max_total_tokens: 100000}", "rollout.tp=8", "rollout.engines=1")
    assert split.memory.worst.most["engine", "KV cache"] == cache / 8
    whole = planned("rollout.engine_args={mem_fraction_static: 0.5}", *ONE[:1]).memory
    assert whole.worst.most["engine", "KV cache"] == pytest.approx(0.5 * 150e9 - 2 * OF_8B, rel=1e-2)


def test_latents_are_cached_whole_on_every_rank() -> None:
    run = planned(name="examples/plans/deepseek-v3-grpo-512xh200").run
    assert run.engines is not None
    assert run.engines.kv_bytes_per_token == 61 * (512 + 64) * 2


@pytest.mark.parametrize(("recompute", "expected"), [("none", 35.75), ("selective", 12.75), ("full", 2.0)])
def test_transformer_engine_keeps_what_its_modules_save(recompute: str, expected: float) -> None:
    """Bytes per token and hidden unit of a layer of Llama 70B, counted by hand without norms' statistics and rotary tables.

    Norm and product (input, normalised) twice, rotated q and k, all of qkv, attention's output, gate and up, their product. Of
    an MLP that is computed anew (`selective`) only its input is kept.
    """
    shape = ModelShape.read("examples/models/llama-3.1-70b")
    of_layer: Any = layer_activations(shape, Layout(), Precision("transformer_engine", 2), has_experts=False, mean_length=1000)
    assert of_layer.kept(recompute) / shape.hidden == pytest.approx(expected, rel=0.015)
