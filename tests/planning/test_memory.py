"""Planned bytes against what the tensors of real ranks sum to, within a tenth, and what follows from the schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.config.sections import PolicyConfig
from megarl.megatron.layer_specs import CORE_VERSION
from megarl.megatron.options import PredictionOptions
from megarl.models.shape import shape_of
from megarl.option_list import OPTIONS
from megarl.planning.activations import Precision
from megarl.planning.memory import Workload, role_memory
from megarl.planning.optimizer_bytes import StateBytes, state_bytes
from megarl.planning.roles import PlannedRole
from megarl.planning.schedules import first_chunk_in_flight, in_flight
from tests.planning.ranks import VOCABULARY, held, precision_aware
from tests.world import World

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rms_norm_eps": 1e-6,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
    },
}
MODELS["deepseek_v3-mtp"] = MODELS["deepseek_v3"] | {"num_nextn_predict_layers": 1}
MODELS["olmo2"] = {"architectures": ["Olmo2ForCausalLM"]}
MODELS["glm4"] = {"architectures": ["Glm4ForCausalLM"], "head_dim": 32, "attention_bias": True}
MODELS["gemma3"] = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 32,
    "sliding_window": 64,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 32,
}
MODELS["gemma2"] = {**MODELS["gemma3"], "architectures": ["Gemma2ForCausalLM"]}
MODELS["gpt_oss"] = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "sliding_window": 64,
}
MODELS["mimo_v2"] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "head_dim": 32,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 64,
    "rope_parameters": {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")},
}
if "shortcut_experts" in OPTIONS:
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    MODELS["longcat_flash"] = {
        "architectures": ["LongcatFlashForCausalLM"],
        "num_layers": 4,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "ffn_hidden_size": COMMON["intermediate_size"],
        "head_dim": 8,
        "n_routed_experts": 8,
        "zero_expert_num": 0,  # of a choice that falls on one nothing is kept
        "moe_topk": 2,
        "expert_ffn_hidden_size": 96,
        **{name: MODELS["deepseek_v3"][name] for name in latent},
    }
if "state_spaces" in OPTIONS:
    MODELS["granite_hybrid"] = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "intermediate_size": 96,
        "shared_intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
    }
    MODELS["nemotron_h"] = {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "ME*-",
        "head_dim": 32,
        "ssm_state_size": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 128,
    }
TOKENS, SCORED = 256, 192


@dataclass(frozen=True)
class Case:
    """A model under a layout, `options` of ModelOptions beside it, and the micro-batches of an update."""

    model: str
    layout: Layout
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2

    @property
    def name(self) -> str:
        """For the table and the test's name."""
        sizes = {size: getattr(self.layout, size) or 1 for size in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
        said = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        said += ["sp"] if self.layout.sequence_parallel else []
        chosen = {
            name: value for name, value in self.options.items() if name not in ("megatron", "fp8_recipe", "prediction", "lora")
        }
        chosen |= {"lora": f"lora of {','.join(self.options['lora'].targets)}"} if "lora" in self.options else {}
        fields = [f"{name}={value}".replace("torch.", "") for name, value in self.options.get("megatron", {}).items()]
        return " ".join([self.model, *(said or ["one rank"]), *map(str, chosen.values()), *fields])

    def planned(self, stage: int) -> dict[str, float]:
        """Planned bytes of a rank of a stage. Plans are of megatron-core 0.19; 0.16 splits experts' state otherwise."""
        with pytest.MonkeyPatch.context() as patch:
            if CORE_VERSION < (0, 17) and self.layout.ep == 1:
                patch.setattr(Layout, "edp", property(lambda layout: layout.dp * layout.cp))
            return self._planned(stage)

    def _planned(self, stage: int) -> dict[str, float]:
        megatron = {name: str(value).removeprefix("torch.") for name, value in self.options.get("megatron", {}).items()}
        trained = PolicyConfig(
            megatron={name: {"True": True, "False": False}.get(value, value) for name, value in megatron.items()}
        )
        shape = shape_of(COMMON | MODELS[self.model])
        shape = shape.with_prediction if "prediction" in self.options else shape
        shape = shape.with_lora(self.options.get("lora"))
        role = PlannedRole("policy", "policy", shape, self.layout, False, trained, TOKENS, None)
        itemsize = 2 if self.options.get("dtype") == "bfloat16" else 4
        precision = Precision("reference", itemsize, self.options.get("recompute", "none"))
        return dict(role_memory(role, stage, precision, Workload(TOKENS, SCORED, self.micro_batches, TOKENS / 2)).parts)


SP = {"tp": 2, "sequence_parallel": True}
MTP = {"prediction": PredictionOptions()}
LOW = {"dtype": "bfloat16", "megatron": {"grad_reduce_in_fp32": False}}
CASES = [
    Case("llama", Layout()),
    Case("llama", Layout(), {"recompute": "selective"}),
    Case("llama", Layout(cp=2)),
    Case("llama", Layout(pp=2, vpp=2), micro_batches=4),
    Case("llama", Layout(pp=2, dp=2), {"recompute": "full"}, micro_batches=4),
    Case("llama", Layout(**SP, pp=2), {"dtype": "bfloat16"}, micro_batches=4),
    Case("olmo2", Layout()),
    Case("olmo2", Layout(**SP), {"dtype": "bfloat16"}),
    Case("glm4", Layout()),
    Case("gemma3", Layout()),
    Case("gemma3", Layout(**SP), {"dtype": "bfloat16"}),
    Case("gemma2", Layout()),
    Case("gemma2", Layout(**SP), {"dtype": "bfloat16"}),
    Case("gpt_oss", Layout()),
    Case("gpt_oss", Layout(dp=2, ep=2), {"dtype": "bfloat16"}),
    Case("qwen3_moe", Layout()),
    Case("qwen3_moe", Layout(**SP)),
    Case("qwen3_moe", Layout(**SP, etp=2)),
    Case("qwen3_moe", Layout(dp=2, ep=2), {"dtype": "bfloat16"}),
    Case("qwen3_moe", Layout(**SP, pp=2, ep=2), micro_batches=4),
    Case("deepseek_v3", Layout()),
    Case("deepseek_v3", Layout(**SP, ep=2)),
    Case("deepseek_v3", Layout(pp=2), {"recompute": "full"}),
    Case("deepseek_v3", Layout(dp=2, ep=2, pp=2), {"dtype": "bfloat16"}),
    Case("llama", Layout(dp=2), LOW),
    Case("deepseek_v3", Layout(dp=2, ep=2), LOW),
    Case("deepseek_v3-mtp", Layout(), MTP),
    Case("deepseek_v3-mtp", Layout(**SP, pp=2), MTP | {"dtype": "bfloat16"}),
]
CASES += [Case("mimo_v2", Layout()), Case("mimo_v2", Layout(**SP), {"dtype": "bfloat16"})]
if "shortcut_experts" in OPTIONS:
    CASES += [Case("longcat_flash", Layout()), Case("longcat_flash", Layout(**SP), {"dtype": "bfloat16"})]
if "state_spaces" in OPTIONS:
    CASES += [Case("granite_hybrid", Layout()), Case("nemotron_h", Layout())]
    CASES += [Case("nemotron_h", Layout(**SP), {"dtype": "bfloat16"})]
PRECISE = {"use_precision_aware_optimizer": True}
BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
PRECISION_AWARE = [
    Case("llama", Layout(dp=2), {"dtype": "bfloat16", "megatron": PRECISE}),
    Case("llama", Layout(dp=2), {"dtype": "bfloat16", "megatron": PRECISE | BF16_MOMENTS | {"store_param_remainders": False}}),
    Case("llama", Layout(dp=2), {"dtype": "bfloat16", "megatron": PRECISE | BF16_MOMENTS | LOW["megatron"]}),
    Case("llama", Layout(dp=2), {"dtype": "bfloat16", "megatron": PRECISE | {"main_params_dtype": torch.float16}}),
    Case("llama", Layout(dp=2), {"dtype": "float32", "megatron": PRECISE | {"exp_avg_sq_dtype": torch.float16}}),
    Case("qwen3_moe", Layout(dp=2, ep=2), {"dtype": "bfloat16", "megatron": PRECISE | {"exp_avg_dtype": torch.uint8}}),
]


def measured(world: World, case: Case) -> list[dict[str, int]]:
    """Bytes of every rank."""
    arguments = (case.layout, COMMON | MODELS[case.model], case.options, TOKENS, SCORED, case.micro_batches)
    return world.call(held, *arguments, size=case.layout.world_size)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planned_memory_is_what_real_tensors_sum_to(world: World, case: Case) -> None:
    assert_planned(world, case)


def assert_planned(world: World, case: Case) -> None:
    of_ranks = measured(world, case)
    for stage in range(case.layout.pp):
        planned = case.planned(stage)
        ranks = [rank for number, rank in enumerate(of_ranks) if case.layout.coords(number).pp == stage]
        assert {rank["parameters"] for rank in ranks} == {planned["parameters"]}
        for part in ("gradients", "optimizer", "activations"):
            most = max(rank[part] for rank in ranks)
            assert planned[part] == pytest.approx(most, rel=0.1), part
        assert planned["optimizer step"] == pytest.approx(max(rank["copied"] for rank in ranks), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRECISION_AWARE, ids=lambda case: case.name)
def test_planned_state_is_what_megatron_core_has_a_precision_aware_adam_allocate(case: Case) -> None:
    arguments = (case.layout, COMMON | MODELS[case.model], case.options, TOKENS, SCORED, case.micro_batches)
    with World(case.layout.world_size) as own:
        of_ranks = own.call(precision_aware, *arguments)
    planned = case.planned(0)
    for part in ("gradients", "optimizer"):
        assert sum(rank[part] for rank in of_ranks) / len(of_ranks) == pytest.approx(planned[part], rel=2e-3), part


@pytest.mark.parametrize(
    ("given", "recipe", "expected"),
    [
        ({}, None, StateBytes(4, 8, 4, 0)),
        ({"grad_reduce_in_fp32": False}, None, StateBytes(2, 8, 4, 4)),
        (PRECISE, None, StateBytes(4, 8, 2, 0)),
        (PRECISE, "delayed", StateBytes(4, 8, 2, 0)),
        (PRECISE, "blockwise", StateBytes(4, 8, 4, 0)),
        (PRECISE | {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "bfloat16"}, None, StateBytes(4, 3, 2, 8)),
        (PRECISE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}, None, StateBytes(4, 4, 2, 0)),
        (PRECISE | {"main_params_dtype": "float16"}, "blockwise", StateBytes(4, 8, 2, 4)),
        (PRECISE | {"main_grads_dtype": "bfloat16", "grad_reduce_in_fp32": False}, None, StateBytes(2, 8, 2, 0)),
    ],
)
def test_bytes_of_a_bfloat16_weight_follow_megatron_cores_options(
    given: dict[str, Any], recipe: str | None, expected: StateBytes
) -> None:
    assert state_bytes(given, 2, recipe) == expected


@pytest.mark.parametrize(
    ("pp", "vpp", "stage", "micro_batches", "expected"),
    [(4, 1, 0, 8, 4), (4, 1, 3, 8, 1), (4, 1, 0, 2, 2), (4, 2, 0, 8, 11 / 2), (4, 2, 3, 8, 5 / 2), (2, 2, 0, 1, 2)],
)
def test_micro_batches_in_flight(pp: int, vpp: int, stage: int, micro_batches: int, expected: float) -> None:
    assert in_flight(pp, vpp, stage, micro_batches) == expected


@pytest.mark.parametrize(
    ("pp", "vpp", "micro_batches", "expected"),
    [(4, 1, 8, 4), (4, 1, 2, 2), (2, 2, 8, 4), (4, 2, 16, 8), (4, 3, 16, 8), (4, 2, 3, 4)],
)
def test_micro_batches_in_flight_through_the_first_chunk(pp: int, vpp: int, micro_batches: int, expected: int) -> None:
    assert first_chunk_in_flight(pp, vpp, micro_batches) == expected
