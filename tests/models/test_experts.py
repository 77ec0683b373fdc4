"""The weight map of every family and of models with experts: tp, etp and ep, layers that differ, and large models."""

from __future__ import annotations

import time
import tracemalloc
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.errors import ConfigError, LayoutError, ModelError
from megarl.models.check_layouts import _check_layout
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for
from megarl.models.shape import shape_of
from megarl.models.weight_map import WeightMap
from megarl.models.weight_tensors import hf_from_shards, shard_from_hf
from tests.families import VARIANTS, hub_tensors, hugging_face
from tests.models.megatron_models import megatron_names

EXPERT_MODELS = [name for name, family in VARIANTS.items() if family.num_experts and family.class_prefix != "NemotronH"]
"""Those whose experts have a gate."""
PADDED_VOCAB = 132


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[dict[str, Any], WeightMap, dict[str, Tensor]]]:
    """Config, weight map and hub tensors of each variant."""
    found = {}
    for name in VARIANTS:
        model = hugging_face(name)
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        found[name] = (config, architecture_for(config).weight_map(config), hub_tensors(model))
    return found


def split(tp: int, etp: int, ep: int) -> Any:
    """Each size splits tensors of its own: `make test` has one size at a time, and all three at once."""
    one_or_all = sum(size > 1 for size in (tp, etp, ep)) <= 1 or tp == etp == ep
    return () if one_or_all else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "tp", "etp", "ep"),
    [
        pytest.param(name, *sizes, marks=split(*sizes))
        for name, family in VARIANTS.items()
        for sizes in product((1, 2, 4), repeat=3)
        if family.num_experts or sizes[1:] == (1, 1)
    ],
)
def test_hf_to_ranks_to_hf_is_byte_equal_and_complete(models: Any, name: str, tp: int, etp: int, ep: int) -> None:
    _, weight_map, tensors = models[name]
    per_rank = weight_map.num_experts // ep
    exported: dict[str, Tensor] = {}
    for ep_rank in range(ep):
        mine = range(ep_rank * per_rank, (ep_rank + 1) * per_rank)
        for megatron_name in megatron_names(weight_map, range(4), True, True, experts=mine):
            rule = weight_map.rule_for(megatron_name)
            if rule.expert is None and ep_rank:
                continue
            assert rule.expert is None or rule.expert // per_rank == ep_rank
            size = tp if rule.expert is None else etp
            shards = [shard_from_hf(rule, tensors.__getitem__, rank, size, PADDED_VOCAB) for rank in range(size)]
            assert {tuple(shard.shape) for shard in shards} == {rule.shape(size, PADDED_VOCAB)}
            for hf_name, tensor in hf_from_shards(rule, shards):
                assert hf_name not in exported
                exported[hf_name] = tensor
    assert exported.keys() == tensors.keys() == set(weight_map.hf_names())
    for hf_name, tensor in exported.items():
        assert torch.equal(tensor, tensors[hf_name]), hf_name


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_an_experts_shard_is_its_own_gate_and_up_rows_and_down_columns(models: Any, name: str, etp: int) -> None:
    _, weight_map, tensors = models[name]
    number = max(n for n in range(4) if any(f"layers.{n}." in each and ".experts.0." in each for each in tensors))
    deepseek_v4 = name.startswith("deepseek_v4")
    as_mixtral = name.startswith(("mixtral", "minimax_m2", "kimi_linear"))
    blocks = {"granite_hybrid": "block_sparse_moe.", "llama4": "feed_forward.", "step3p5": "moe.", "gemma4_moe": ""}
    block = "block_sparse_moe." if as_mixtral else blocks.get(name.partition("-")[0], "mlp.")
    layer = f"layers.{number}.ffn." if deepseek_v4 else f"model.layers.{number}.{block}"
    gate, up, down = ("w1", "w3", "w2") if as_mixtral or deepseek_v4 else ("gate_proj", "up_proj", "down_proj")
    for expert in range(weight_map.num_experts):
        prefix = f"decoder.layers.{number}.mlp.experts.local_experts.{expert}."
        fc1, fc2 = weight_map.rule_for(prefix + "linear_fc1.weight"), weight_map.rule_for(prefix + "linear_fc2.weight")
        of = {which: tensors[f"{layer}experts.{expert}.{which}.weight"] for which in (gate, up, down)}
        for rank in range(etp):
            halves = shard_from_hf(fc1, tensors.__getitem__, rank, etp).chunk(2)
            assert torch.equal(halves[0], of[gate].chunk(etp)[rank])
            assert torch.equal(halves[1], of[up].chunk(etp)[rank])
            assert torch.equal(shard_from_hf(fc2, tensors.__getitem__, rank, etp), of[down].chunk(etp, dim=1)[rank])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_is_bound_once_and_found_again_in_every_spelling(models: Any, name: str) -> None:
    _, weight_map, _ = models[name]
    bound = list(weight_map.bound_rules())
    plain = megatron_names(weight_map, range(4), True, True)
    assert sorted(rule.megatron_name for rule in bound) == sorted(
        each for each in plain if not weight_map.rule_for(each).tied_copy
    )
    for rule in bound:
        assert weight_map.rule_for(rule.megatron_name) == rule
        assert (f".layers.{rule.layer}." in rule.megatron_name) == (rule.layer is not None)
        assert (f".local_experts.{rule.expert}." in rule.megatron_name) == (rule.expert is not None)
    for own, te_name in zip(plain, megatron_names(weight_map, range(4), True, True, te_names=True), strict=True):
        assert weight_map.rule_for(own) == weight_map.rule_for(te_name)
    order = [rule.layer for rule in bound if rule.layer is not None]
    assert order == sorted(order)
    assert [rule.layer for rule in (bound[0], bound[-1])] == [None, None]


def test_transformer_engines_names_of_experts_and_norms(models: Any) -> None:
    """As TEGroupedMLP and the layer-norm-linear modules of megatron-core 0.16.1 call them."""

    def te_names(name: str, layer: int) -> set[str]:
        _, weight_map, _ = models[name]
        names = megatron_names(weight_map, [layer], False, False, experts=[1], te_names=True)
        return {each.removeprefix(f"decoder.layers.{layer}.") for each in names}

    experts = {"mlp.router.weight", "mlp.experts.linear_fc1.weight1", "mlp.experts.linear_fc2.weight1"}
    attention = {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
    }
    mlp = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    assert te_names("mixtral", 0) == attention | experts | {"pre_mlp_layernorm.weight"}
    assert te_names("llama", 0) == attention | mlp
    latent = {
        "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.linear_proj.weight",
    }
    shared = {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight", "mlp.router.expert_bias"}
    assert te_names("deepseek_v3", 0) == latent | mlp
    assert te_names("deepseek_v3", 1) == latent | experts | shared | {"pre_mlp_layernorm.weight"}


def test_what_does_not_fit_is_a_sentence(models: Any) -> None:
    _, weight_map, tensors = models["deepseek_v3"]
    fc1 = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"
    with pytest.raises(ModelError, match="of 8 experts"):
        weight_map.rule_for(fc1.format(1, 8))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\S* is not in this model's weight map"):
        weight_map.rule_for(fc1.format(0, 1))  # the first layer is dense
    with pytest.raises(LayoutError, match="tp is 3"):
        shard_from_hf(weight_map.rule_for(fc1.format(1, 1)), tensors.__getitem__, 0, 3)


def test_the_expert_bias_stays_float32_and_whole(models: Any) -> None:
    _, weight_map, _ = models["deepseek_v3"]
    rule = weight_map.rule_for("decoder.layers.1.mlp.router.expert_bias")
    assert (rule.dtype, rule.tp_axis, rule.expert, rule.shape(4)) == ("float32", None, None, (8,))
    assert {rule.dtype for rule in weight_map.bound_rules() if "expert_bias" not in rule.megatron_name} == {None}


def test_layers_for_multi_token_prediction_are_left_out_and_nothing_else_is(models: Any, tmp_path: Path) -> None:
    config, _, tensors = models["deepseek_v3"]
    config = config | {"num_nextn_predict_layers": 1}
    weight_map = architecture_for(config).weight_map(config)
    extra = {"model.layers.4.eh_proj.weight": torch.zeros(32, 64), "model.layers.4.embed_tokens.weight": torch.zeros(131, 32)}
    write_hf_folder(tmp_path / "with", (tensors | extra).items(), config)
    HFFolder(tmp_path / "with").check(weight_map)
    assert not set(weight_map.hf_names()) & extra.keys()
    write_hf_folder(tmp_path / "more", (tensors | {"model.layers.5.eh_proj.weight": torch.zeros(1)}).items(), config)
    with pytest.raises(ModelError, match=r"model\.layers\.5\.eh_proj\.weight' in .* has no place"):
        HFFolder(tmp_path / "more").check(weight_map)


DEEPSEEK_V3_671B = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}

GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
}
GPT_OSS_20B = GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
}

MOONLIGHT_16B = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


FULL, WINDOW = "full_attention", "sliding_attention"
STEP_3_5_FLASH = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "vocab_size": 128896,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 3.0,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "attention_other_setting": {
        "attention_type": WINDOW,
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
    "layer_types": [WINDOW if layer % 4 else FULL for layer in range(48)],
    "rope_theta": [1e4 if layer % 4 else 5e6 for layer in range(48)],
    "partial_rotary_factors": [1.0 if layer % 4 else 0.5 for layer in range(48)],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": [FULL],
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3,
    "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3,
    "sliding_window": 512,
    "num_nextn_predict_layers": 3,
    "max_position_embeddings": 262144,
}
"""With entries for the three layers for multi-token prediction, as published; 196.81 billion parameters are said of it."""


MIMO_V2_FLASH = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "hybrid_layer_pattern": [int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(48)],
    "moe_layer_freq": [0] + [1] * 47,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": None,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "routed_scaling_factor": None,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
}
"""Without its layers for multi-token prediction; 309 billion parameters are said of it."""


def dense_config(
    name: str, vocab: int, hidden: int, ffn: int, layers: int, heads: int, groups: int, **more: Any
) -> dict[str, Any]:
    """The fields of a dense model's config that its size follows from."""
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": 4096}
    return {"architectures": [f"{name}ForCausalLM"], **sizes, **heads_of, **more}


PUBLISHED = {
    "DeepSeek-V3": (DEEPSEEK_V3_671B, 671.026),
    "Qwen3-235B-A22B": (QWEN3_235B, 235.094),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46.703),
    "Llama-3.1-405B": (LLAMA_405B, 405.853),
    "GLM-4.5-Air": (GLM_4_5_AIR, 106.852),
    "Step-3.5-Flash": (STEP_3_5_FLASH, 196.956),
    "MiMo-V2-Flash": (MIMO_V2_FLASH, 308.779),
    "gpt-oss-120b": (GPT_OSS_120B, 116.829),
    "gpt-oss-20b": (GPT_OSS_20B, 20.915),
    "Moonlight-16B-A3B": (MOONLIGHT_16B, 15.960),
    "Phi-4": (dense_config("Phi3", 100352, 5120, 17920, 40, 40, 10), 14.660),
    "OLMo-2-1124-7B": (dense_config("Olmo2", 100352, 4096, 11008, 32, 32, 32), 7.299),
    "OLMo-2-0325-32B": (dense_config("Olmo2", 100352, 5120, 27648, 64, 40, 8), 32.234),
    "gemma-3-1b": (dense_config("Gemma3", 262144, 1152, 6912, 26, 4, 1), 1.000),
    "Olmo-3-7B": (dense_config("Olmo3", 100278, 4096, 11008, 32, 32, 32), 7.298),
    "Seed-OSS-36B": (dense_config("SeedOss", 155136, 5120, 27648, 64, 80, 8), 36.151),
    "GLM-4-9B-0414": (dense_config("Glm4", 151552, 4096, 13696, 40, 32, 2, attention_bias=True), 9.400),
    "SmolLM3-3B": (dense_config("SmolLM3", 128256, 2048, 11008, 36, 16, 4), 3.075),
    "granite-3.3-8b": (dense_config("Granite", 49159, 4096, 12800, 40, 32, 8, tie_word_embeddings=True), 8.171),
}


@pytest.mark.parametrize(("config", "billions"), PUBLISHED.values(), ids=PUBLISHED)
def test_large_models_have_as_many_parameters_as_published(config: dict[str, Any], billions: float) -> None:
    shapes = architecture_for(config).weight_map(config).hf_shapes()
    assert sum(map(prod, shapes.values())) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_a_model_of_671_billion_is_listed_in_seconds_and_megabytes() -> None:
    started = time.process_time()
    weight_map = architecture_for(DEEPSEEK_V3_671B).weight_map(DEEPSEEK_V3_671B)
    rules = list(weight_map.bound_rules())
    assert (len(rules), len(weight_map.hf_shapes())) == (30486, 45395)
    assert time.process_time() - started < 3.0
    tracemalloc.start()
    rules = list(weight_map.bound_rules())
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()


def test_the_angles_of_latent_attention_are_cut_over_context_parallel_ranks() -> None:
    config = hugging_face("deepseek_v3").config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    shape = shape_of(config)
    for cp in (1, 2, 4, 8):
        _check_layout("policy.layout", Layout(cp=cp), shape)
    sentence = (
        r"policy.layout.cp is 3, which does not cut megatron-core's table of 16 angles \(original_max_position_embeddings\) "
        "into 2 \\* cp chunks; it must be 1, 2, 4 or 8"
    )
    with pytest.raises(ConfigError, match=sentence):
        _check_layout("policy.layout", Layout(cp=3), shape)
    _check_layout("policy.layout", Layout(cp=3), shape_of(config | {"rope_parameters": {"rope_theta": 1e4}}))
