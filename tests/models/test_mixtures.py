"""MiniMax-M2, ERNIE 4.5, Hunyuan V1, Solar-Open: what is refused, what a config leaves out, and sizes of published models."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.errors import LayoutError, ModelError
from megarl.models.registry import architecture_for
from megarl.models.rope_frequencies import inverse_frequencies
from megarl.models.shape import shape_of
from megarl.models.shrunk import shrunk_config
from megarl.models.weight_map import WeightMap
from megarl.weights.sglang_targets import EngineTarget
from tests.families import hugging_face
from tests.families.family import SIZES
from tests.families.mixtures import ALPHA, FAMILIES

PUBLISHED_M2 = {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "qk_norm_type": "per_layer"}
PUBLISHED_HUNYUAN_MOE = {
    "num_shared_expert": [1] * 4,
    "moe_intermediate_size": [16] * 4,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
}


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """config.json of each family's tiny model."""
    models = {name: hugging_face(name) for name in FAMILIES}
    return {name: model.config.to_dict() | {"architectures": [type(model).__name__]} for name, model in models.items()}


REFUSED = [
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm is False; it must be True"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is False"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64"),
    ("minimax_m2", {"router_jitter_noise": 0.1}, r"router_jitter_noise is 0\.1"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list is .* 1 for every layer"),
    ("minimax_m2", {"rotary_dim": 0, "rope_parameters": None}, "rotary_dim is 0; it must be a positive integer"),
    ("minimax_m2", {"rotary_dim": 14, "rope_parameters": None}, "partial_rotary_factor is 1.1"),
    ("minimax_m2", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
    ("minimax_m2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("ernie4_5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("ernie4_5", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias is True; it must be False"),
    ("ernie4_5_moe", {"moe_layer_start_index": 3}, "none of the layers has experts, but moe_num_experts is 8"),
    ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0; it must be a positive integer"),
    ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index is -2; it must be an integer of at least -1"),
    ("ernie4_5_moe", {"moe_k": 1}, "num_experts_per_tok is 1"),
    ("hunyuan_v1_dense", {"attention_bias": True}, "attention_bias is True"),
    ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm is False; it must be True"),
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla is True; it must be False"),
    ("hunyuan_v1_dense", {"rope_parameters": ALPHA | {"alpha": -1.0}}, r"rope_parameters\.alpha is -1\.0; it must be a number"),
    ("hunyuan_v1_moe", {"attention_bias": True}, "attention_bias is True"),
    ("hunyuan_v1_moe", {"moe_topk": [3, 3, 2, 3]}, r"moe_topk is \[3, 3, 2, 3\]; it must be the same for all layers"),
    ("hunyuan_v1_moe", {"num_experts": [8] * 4}, "num_experts is .*; it must be a positive integer"),
    ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert is 2; it must be 1:"),
    ("hunyuan_v1_moe", {"moe_intermediate_size": [8] * 4}, "moe_intermediate_size is 8; it must be 16:"),
    ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1; it must be 0"),
    ("solar_open", {"use_qk_norm": True}, "use_qk_norm is True; it must be False"),
    ("solar_open", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5; it must be 1"),
    ("solar_open", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("afmoe", {"attention_bias": True}, "attention_bias is True"),
    ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax'; it must be 'sigmoid'"),
    ("afmoe", {"route_norm": False}, "route_norm is False; it must be True"),
    ("afmoe", {"n_group": 2}, "n_group is 2; it must be 1"),
    ("afmoe", {"num_shared_experts": 0}, "num_shared_experts is 0; it must be a positive integer"),
    ("afmoe", {"num_dense_layers": 4}, "none of the layers has experts"),
    ("afmoe", {"sliding_window": None}, "layer_types has 'sliding_attention', but sliding_window is None"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(
    configs: Any, family: str, change: dict[str, Any], message: str
) -> None:
    hf_config = configs[family] | change
    architecture = architecture_for(hf_config)
    with pytest.raises(ModelError, match=message):
        architecture.transformer_config_kwargs(hf_config) | architecture.gpt_kwargs(hf_config)
        inverse_frequencies(architecture.text_config(hf_config), 12)


EXPERTS = {
    "minimax_m2": {"num_local_experts": 256, "num_experts_per_tok": 8},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "solar_open": {"n_routed_experts": 128, "num_experts_per_tok": 8},
    "ernie4_5_moe": {"moe_num_experts": 64},
    "afmoe": {"num_experts": 64, "num_experts_per_tok": 6},
}
"""Which every config says."""


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(family: str) -> None:
    sizes = {name: SIZES[name] for name in SIZES if name not in ("tie_word_embeddings", "num_key_value_heads")}
    sizes |= {"num_attention_heads": 8} | EXPERTS.get(family, {})
    prefix = FAMILIES[family].class_prefix
    config = getattr(transformers, FAMILIES[family].config_class)
    bare = {"architectures": [f"{prefix}ForCausalLM"], "model_type": config.model_type, **sizes}
    filled = config(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None).to_dict()
    filled |= {"architectures": bare["architectures"]}
    architecture = architecture_for(bare)
    assert architecture.transformer_config_kwargs(bare) == architecture.transformer_config_kwargs(filled)
    assert architecture.gpt_kwargs(bare) == architecture.gpt_kwargs(filled)
    assert architecture.weight_map(bare).hf_shapes() == architecture.weight_map(filled).hf_shapes()
    assert architecture.traits(bare) == architecture.traits(filled)
    angles = [inverse_frequencies(architecture.text_config(config), 8) for config in (bare, filled)]
    assert torch.equal(*angles)


def test_rotary_dim_of_published_configs_is_the_share_that_rotates() -> None:
    published = {"rotary_dim": 4, "rope_theta": 5e6, "head_dim": 12, "model_type": "minimax_m2"} | SIZES
    published |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    ours = architecture_for(published).text_config(published)
    reference = transformers.MiniMaxM2Config(**{name: value for name, value in published.items() if name != "model_type"})
    assert torch.equal(inverse_frequencies(ours, 12), inverse_frequencies(reference.to_dict(), 12))
    assert len(inverse_frequencies(ours, 12)) == 2


def test_sequences_as_long_as_alpha_is_for_are_the_longest(configs: Any) -> None:
    assert shape_of(configs["hunyuan_v1_dense"]).exact_positions == (256, "max_position_embeddings")


def test_tensors_that_predict_are_left_out(configs: Any) -> None:
    def left_out(family: str, **change: Any) -> tuple[str, ...]:
        weight_map: WeightMap = architecture_for(configs[family]).weight_map(configs[family] | change)
        return weight_map.left_out

    assert left_out("minimax_m2", num_mtp_modules=2) == ("model.layers.4.", "model.layers.5.")
    assert left_out("minimax_m2") == ()
    assert left_out("ernie4_5_moe") == ("model.mtp_",)


def test_sglang_serves_no_config_that_it_reads_otherwise(configs: Any) -> None:
    def refusal(family: str, **change: Any) -> str | None:
        return architecture_for(configs[family]).sglang.refusal(configs[family] | change)

    assert "must say use_qk_norm = True, use_routing_bias = True, scoring_func" in str(refusal("minimax_m2"))
    assert "must say rotary_dim" in str(refusal("minimax_m2", **PUBLISHED_M2))
    published = PUBLISHED_M2 | {"rotary_dim": 6, "rope_parameters": None, "rope_theta": 1e4}
    assert refusal("minimax_m2", **published) is None
    assert "output layer of its own" in str(refusal("minimax_m2", **published, tie_word_embeddings=True))
    assert "name the class Ernie4_5_ForCausalLM" in str(refusal("ernie4_5"))
    assert "no biases" in str(refusal("ernie4_5", use_bias=True))
    assert refusal("ernie4_5", architectures=["Ernie4_5_ForCausalLM"]) is None
    assert refusal("ernie4_5_moe") is None
    assert "moe_layer_interval" in str(refusal("ernie4_5_moe", moe_layer_interval=2))
    assert "use_qk_norm = true" in str(refusal("hunyuan_v1_dense"))
    assert refusal("hunyuan_v1_dense", use_qk_norm=True) is None
    without = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic NTK" in str(refusal("hunyuan_v1_dense", use_qk_norm=True, rope_parameters=without))
    assert "must say moe_intermediate_size, use_mixed_mlp_moe" in str(refusal("hunyuan_v1_moe"))
    assert refusal("hunyuan_v1_moe", **PUBLISHED_HUNYUAN_MOE) is None
    assert "no model of this family" in str(refusal("solar_open"))
    assert "packs experts otherwise" in str(refusal("afmoe"))


def test_ranks_of_an_engine_hold_the_norms_of_their_heads(configs: Any) -> None:
    """MiniMax-M2's, of all heads together; where KV heads are fewer than ranks, neighbours hold the same one."""
    weight_map = architecture_for(configs["minimax_m2"]).weight_map(configs["minimax_m2"])
    target = EngineTarget(tp=4)
    found = {
        which: target.own_intervals(next(rule for rule in weight_map.rules if f"{which}_layernorm" in rule.megatron_name), 0)
        for which in "qk"
    }
    assert found == {"q": [(0, 12), (12, 24), (24, 36), (36, 48)], "k": [(0, 12), (0, 12), (12, 24), (12, 24)]}


MINIMAX_M2_230B = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 196608,
    "rotary_dim": 64,
    "rope_theta": 5000000,
    "num_mtp_modules": 3,
}
ERNIE_21B = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
ERNIE_0_3B = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
HUNYUAN_7B = {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "vocab_size": 128167,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
HUNYUAN_A13B = HUNYUAN_7B | {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "intermediate_size": 3072,
    "num_experts": 64,
    "moe_topk": [8] * 32,
    "max_position_embeddings": 32768,
}
SOLAR_100B = {
    "architectures": ["SolarOpenForCausalLM"],
    "vocab_size": 196608,
    "hidden_size": 4096,
    "moe_intermediate_size": 1280,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "max_position_embeddings": 131072,
}
TRINITY_MINI = {
    "architectures": ["AfmoeForCausalLM"],
    "vocab_size": 200192,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "max_position_embeddings": 131072,
}
LARGE = {
    "MiniMax-M2": (MINIMAX_M2_230B, "MiniMaxM2", 228.690),
    "ERNIE-4.5-21B-A3B": (ERNIE_21B, "Ernie4_5_Moe", None),
    "ERNIE-4.5-0.3B": (ERNIE_0_3B, "Ernie4_5", 0.361),
    "Hunyuan-7B": (HUNYUAN_7B, "HunYuanDenseV1", 7.505),
    "Hunyuan-A13B": (HUNYUAN_A13B, "HunYuanMoEV1", 80.393),
    "Solar-Open-100B": (SOLAR_100B, "SolarOpen", 102.6),
    "Trinity-Mini": (TRINITY_MINI, "Afmoe", None),
}
"""Configs of published models, transformers' classes, and how many billions of parameters are published, where known."""


@pytest.mark.parametrize("name", LARGE)
def test_large_models_have_as_many_parameters_as_transformers_and_as_published(name: str) -> None:
    config, prefix, billions = LARGE[name]
    found = sum(map(prod, architecture_for(config).weight_map(config).hf_shapes().values()))
    fields = {field: value for field, value in config.items() if field != "architectures"}
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**fields))
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    }
    assert found == sum(tensor.numel() for tensor in tensors.values())
    if billions is not None:
        assert found / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_router_that_drops_no_choices_says_so(configs: Any) -> None:
    from types import SimpleNamespace

    from megarl.megatron.routers import CorrectedSoftmaxRouter

    config: Any = SimpleNamespace(moe_expert_capacity_factor=1.5)
    with pytest.raises(LayoutError, match=r"moe_expert_capacity_factor is 1\.5, but this model's router drops no choices"):
        CorrectedSoftmaxRouter(config, least_sum=1e-12)


REHEARSED = {
    "MiniMax-M2": (2, MINIMAX_M2_230B, {"num_local_experts": 16, "rotary_dim": 8, "num_mtp_modules": 0}),
    "ERNIE-4.5-21B-A3B": (2, ERNIE_21B | {"moe_layer_end_index": 27}, {"moe_num_experts": 12, "moe_layer_end_index": -1}),
    "Hunyuan-A13B": (
        2,
        HUNYUAN_A13B | {"attention_head_dim": 128, "moe_intermediate_size": [3072] * 32},
        {"num_experts": 16, "attention_head_dim": 16, "moe_intermediate_size": 64},
    ),
    "Trinity-Mini": (2, TRINITY_MINI, {"num_dense_layers": 1, "num_experts": 16}),
}


@pytest.mark.parametrize("name", REHEARSED)
def test_a_rehearsal_makes_a_small_model_of_the_family(name: str) -> None:
    tp, config, expected = REHEARSED[name]
    small = shrunk_config(config, [Layout(tp=tp)], engine_ranks=tp, engine_ep=1, vocab_size=64)
    assert {field: small[field] for field in expected} == expected
    shape = shape_of(small)
    assert shape.layers == 2
    assert shape.expert_layers
