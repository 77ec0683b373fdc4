"""What a plan says of engines that prefill and engines that decode: seconds of each kind, and bytes between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl import cli
from megarl.config import load_config
from megarl.options.disaggregation.times import DisaggregationPlan, disaggregation_plan
from megarl.planning.gpus import gpu_named
from megarl.planning.plan import CapacityPlan, make_plan
from tests.planning.printed import planned

ROOT = Path(__file__).parents[3]
PATH = "examples/plans/qwen3-32b-grpo-128xh100-32k-async.yaml"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan_of(*overrides: str) -> CapacityPlan:
    return make_plan(load_config(PATH, [*overrides]), gpu_named("h100"))


def parted(plan: CapacityPlan) -> DisaggregationPlan:
    found = disaggregation_plan(plan)
    assert found is not None
    return found


def test_keys_and_values_of_a_prompt_are_counted_from_the_models_sizes() -> None:
    """Qwen3-32B: 64 layers, 8 KV heads of 128, K and V in bfloat16; prompts of 512 tokens on average, 16 to a group."""
    found = parted(plan_of("rollout.disaggregation={prefill: 4, decode: 20}"))
    of_prompt = 512 * 64 * 2 * 8 * 128 * 2
    assert found.prompt_bytes == of_prompt
    gpu = gpu_named("h100")
    rate = gpu.network_gb_per_s * 1e9 * gpu.efficiencies.links  # 96 GPUs are several nodes
    assert found.link_bytes_per_s == rate
    assert found.prompt_s == pytest.approx(of_prompt / 4 / rate)  # a rank of four has two of the heads
    assert found.transfer_s == pytest.approx(256 * of_prompt / 4 / 4 / rate)  # by the fewer engines of a kind


def test_decoding_is_that_of_so_many_engines_without_their_prompts_and_prefill_goes_with_its_own() -> None:
    found = parted(plan_of("rollout.disaggregation={prefill: 4, decode: 20}"))
    alone, both = plan_of("rollout.engines=20"), plan_of()
    [phase] = [phase for phase in alone.times.phases if phase.name == "generate"]
    assert found.decode_s == pytest.approx(phase.seconds - phase.parts["prefill"])
    [whole] = [phase for phase in both.times.phases if phase.name == "generate"]
    assert found.together_s == pytest.approx(whole.seconds)
    assert found.prefill_s == pytest.approx(whole.parts["prefill"] * 24 / 4)
    twice = parted(plan_of("rollout.disaggregation={prefill: 8, decode: 16}"))
    assert twice.prefill_s == pytest.approx(found.prefill_s / 2)
    assert twice.decode_s > found.decode_s


def test_the_step_waits_for_the_slower_kind() -> None:
    decoding = plan_of("rollout.disaggregation={prefill: 4, decode: 20}")
    assert decoding.times.seconds("generate") == parted(decoding).decode_s
    lengths = ("data.max_prompt_tokens=32000", "rollout.max_new_tokens=64", "policy.max_tokens_per_micro_batch=33792")
    prefill = plan_of("rollout.disaggregation={prefill: 1, decode: 23}", *lengths)
    found = parted(prefill)
    assert found.bound == "prefill"
    assert prefill.times.seconds("generate") == found.prefill_s > found.decode_s
    assert found.balanced > 1
    better = parted(plan_of(f"rollout.disaggregation={{prefill: {found.balanced}, decode: {24 - found.balanced}}}", *lengths))
    assert max(better.seconds.values()) < max(found.seconds.values())


def test_both_kinds_get_weights_and_gpus() -> None:
    plan, plain = plan_of("rollout.disaggregation={prefill: 4, decode: 20}"), plan_of()
    assert plan.run.gpus == plain.run.gpus == 128
    assert plan.times.seconds("sync") == plain.times.seconds("sync")


def test_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["plan", PATH, "rollout.disaggregation={prefill: 4, decode: 20}"])
    printed = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "side by side: decoding is waited for; with 1 of 24 for prompts both would take about as long" in printed
    assert "A prompt's keys and values are 134 MB" in printed
    tree = planned(capsys, PATH, "rollout.disaggregation={prefill: 4, decode: 20}")
    figures = tree["times"]["disaggregation"]
    assert (figures["prefill"], figures["decode"], figures["balanced_prefill"]) == (4, 20, 1)
    assert disaggregation_plan(plan_of()) is None
