"""Adapters in plans: as many parameters as dense formulas and peft count, no second model, and updates that are small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.config import load_any
from megarl.config.layout import Layout
from megarl.models.flops import FlopsModel
from megarl.models.shape import ModelShape, shape_of
from megarl.models.update_flops import update_flops
from megarl.options.lora.weight_map import Lora
from megarl.planning.gpus import gpu_named
from megarl.planning.parameters import stage_parameters
from megarl.planning.plan import make_plan
from megarl.weights.run_plan import plan_of_run
from tests.models.test_flops import responses

ROOT = Path(__file__).parents[3]
LARGE = ROOT / "examples/lora/llama-3.1-70b-grpo-8xh100.yaml"
RANK = 4
LORA = Lora(rank=RANK, alpha=8.0)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA = shape_of(SIZES | {"architectures": ["LlamaForCausalLM"]})
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
QWEN3_MOE = shape_of(SIZES | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]})


def of_llama(tp: int, layers: int) -> int:
    """Of a rank: A is whole beside layers split by outputs, B beside those split by inputs."""
    qkv = RANK * (3 * 32 + (32 + 16 + 16) // tp)
    output = RANK * (32 // tp + 32)
    gate_up = RANK * 2 * (32 + 24 // tp)
    down = RANK * (24 // tp + 32)
    return layers * (qkv + output + gate_up + down)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_adapters_of_a_rank_are_those_of_the_dense_formula(tp: int, pp: int) -> None:
    plain = stage_parameters(LLAMA, Layout(tp=tp, pp=pp, dp=2))
    for stage, before in zip(stage_parameters(LLAMA.with_lora(LORA), Layout(tp=tp, pp=pp, dp=2)), plain, strict=True):
        assert stage.adapters == stage.trained == of_llama(tp, 4 // pp)
        assert stage.dense == before.dense + stage.adapters
        assert stage.frozen_dense == before.dense
        assert stage.products == before.products


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (2, 2)])
def test_experts_of_a_rank_have_an_adapter_each(ep: int, etp: int) -> None:
    (stage,) = stage_parameters(QWEN3_MOE.with_lora(LORA), Layout(dp=4, ep=ep, etp=etp))
    of_expert = RANK * (2 * (32 + 12 // etp) + 12 // etp + 32)
    attention = RANK * (3 * 32 + 32 + 16 + 16 + 32 + 32)
    assert stage.trained_expert == 4 * (8 // ep) * of_expert
    assert stage.trained_dense == 4 * attention
    assert stage.adapters == stage.trained


def test_chosen_layers_alone_have_adapters() -> None:
    chosen = replace(LORA, targets=("q_proj", "*.layers.1.mlp.*"), exclude=("*.layers.0.*",))
    (stage,) = stage_parameters(LLAMA.with_lora(chosen), Layout())
    assert stage.adapters == RANK * (3 * (32 + 32) + 3 * (32 + 24))


@pytest.mark.parametrize(("model", "rank"), [("llama-3.1-70b", 32), ("llama-3.1-8b", 16), ("qwen3-32b", 8)])
def test_adapters_of_published_models_are_as_many_as_peft_makes(model: str, rank: int) -> None:
    peft = pytest.importorskip("peft")
    import torch
    import transformers

    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(f"examples/models/{model}")
        )
        wrapped = peft.get_peft_model(built, peft.LoraConfig(r=rank, target_modules="all-linear"))
    counted = sum(p.numel() for name, p in wrapped.named_parameters() if "lora_" in name)
    (stage,) = stage_parameters(ModelShape.read(f"examples/models/{model}").with_lora(Lora(rank, 1.0)), Layout())
    assert stage.adapters == counted
    if model == "llama-3.1-70b":
        assert counted == 80 * 32 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))


def test_an_update_computes_gradients_of_adapters_alone() -> None:
    whole, adapted = FlopsModel.of(QWEN3_MOE), FlopsModel.of(QWEN3_MOE.with_lora(LORA))
    of_token = 2 * 4 * RANK * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * 3 * (32 + 12))
    assert adapted.per_token - whole.per_token == of_token
    share = responses(5, 2, 7, 7)
    how: dict[str, Any] = {"shared_prompts": True, "position": _next(), "logits": True}
    tokens, rows = 2 + 5 * 6, 5 * 7  # the prompt once
    frozen = whole.per_token * tokens + whole.per_logit_row * rows
    expected = update_flops(whole, [share], **how).total + 3 * of_token * tokens - frozen
    assert update_flops(adapted, [share], **how).total == expected


def _next() -> Any:
    from megarl.data.stream import ScorePosition

    return ScorePosition.NEXT


def test_a_70b_fits_on_eight_gpus_with_its_reference_and_its_engine() -> None:
    config, gpu = load_any(LARGE), gpu_named("h100")
    plan = make_plan(config, gpu)
    assert plan.run.gpus == 8
    assert plan.fits
    policy, reference = plan.run.roles
    assert (reference.name, reference.shares_weights) == ("reference", True)
    assert all(stage.dense == 0 for stage in reference.parameters)
    assert policy.adapters == 414187520
    parts = plan.memory.worst.most
    (stage,) = policy.parameters
    assert parts[("policy", "parameters")] == 2 * stage.dense
    assert parts[("policy", "gradients")] == 4 * stage.adapters
    assert parts[("policy", "optimizer")] == 12 * stage.adapters
    assert ("reference", "parameters") not in parts
    full = make_plan(load_any(LARGE, ["policy.lora.rank=0"]), gpu)
    assert not full.fits


def test_adapters_alone_are_less_than_two_hundredths_of_an_update() -> None:
    adapters, merged = (plan_of_run(_rl(f"policy.lora.sync={sync}")) for sync in ("adapters", "merged"))
    assert adapters.tensors.nbytes.sum() == 2 * 414187520
    assert adapters.tensors.nbytes.sum() < 0.01 * merged.tensors.nbytes.sum()
    assert (
        adapters.own_bytes < 0.03 * merged.own_bytes
    )  # each of an engine's ranks holds the As of layers that are split by outputs


def _rl(*overrides: str) -> Any:
    from megarl.config import load_config

    return load_config(LARGE, list(overrides))


def test_the_search_finds_layouts_with_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(LARGE), "--search", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert any("tp=4" in one["layout"] for one in found["search"]["best"])
    assert cli.main(["plan", str(LARGE)]) == 0
    shown = capsys.readouterr().out
    assert "adapters of rank 32 trained (414.2M parameters)" in shown
    assert "the policy without what its adapters learn" in shown
