"""Architectures: the arguments megatron-core gets follow from either spelling; what cannot be represented is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.errors import LayoutError, ModelError
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import ARCHITECTURES, architecture_for, sequence_classifier
from megarl.models.rope_frequencies import inverse_frequencies
from megarl.models.windows import check_windows
from tests.families import FAMILIES, hugging_face
from tests.families.family import SIZES
from tests.families.settings import LLAMA3_ROPE, LONGROPE, WIDE_YARN, YARN_ROPE

TINY = Path(__file__).parents[2] / "models" / "tiny-arithmetic"
WINDOWS = ["sliding_attention", "full_attention"] * 2
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """config.json of each family's tiny model."""
    models = {name: hugging_face(name) for name in FAMILIES}
    return {name: model.config.to_dict() | {"architectures": [type(model).__name__]} for name, model in models.items()}


def test_transformers_4_and_5_spellings_give_the_same_arguments(configs: Any) -> None:
    new = configs["llama"]
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old |= {"rope_theta": 10000.0, "rope_scaling": scaling}
    architecture = architecture_for(new)
    assert architecture.gpt_kwargs(old) == architecture.gpt_kwargs(new)
    assert architecture.gpt_kwargs(new)["rotary_base"] == 10000
    assert torch.equal(inverse_frequencies(old, 8), inverse_frequencies(new, 8))
    unscaled = inverse_frequencies(old | {"rope_scaling": None}, 8)
    assert not torch.equal(unscaled, inverse_frequencies(new, 8))
    assert torch.equal(inverse_frequencies(old | {"rope_scaling": {"type": "linear", "factor": 2}}, 8), unscaled / 2)
    yarn = configs["deepseek_v3"]
    old = {key: value for key, value in yarn.items() if key not in ("rope_parameters", "num_local_experts")}
    old |= {"rope_theta": 10000.0, "rope_scaling": {**YARN_ROPE, "type": "yarn"}, "n_routed_experts": 8}
    architecture = architecture_for(yarn)
    assert architecture.transformer_config_kwargs(old) == architecture.transformer_config_kwargs(yarn)


REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"layer_types": WINDOWS, "sliding_window": 8}, "layer_types names other layers than 'full_attention'"),
    ("qwen2", {"layer_types": WINDOWS[:3]}, "layer_types has 3 layers; it must say .* for each of the 4 layers"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
    ("qwen2", {"layer_types": WINDOWS, "use_sliding_window": False}, "layer_types names other layers than 'full_attention'"),
    (
        "qwen2",
        {"layer_types": WINDOWS, "sliding_window": None},
        "layer_types has 'sliding_attention', but sliding_window is None",
    ),
    ("mistral", {"layer_types": WINDOWS}, "layer_types names other layers than 'sliding_attention'"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be a positive integer"),
    ("mixtral", {"layer_types": WINDOWS, "sliding_window": 8}, "layer_types names other layers than 'sliding_attention'"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is of method 'fp8'"),
    ("llama", {"hidden_size": None}, "hidden_size is None"),
    ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads=4"),
    ("llama", {"head_dim": None, "hidden_size": 30}, "hidden_size is 30, but without head_dim"),
    ("llama", {"rope_parameters": {"rope_type": "yarnn", "factor": 2.0}}, r"rope_parameters\.rope_type is 'yarnn'.*'yarn'"),
    ("llama", {"rope_parameters": YARN_ROPE | {"factor": 0.5}}, r"rope_parameters\.factor is 0\.5; it must be .* at least 1"),
    ("llama", {"rope_parameters": YARN_ROPE | {"truncate": 1}}, r"rope_parameters\.truncate is 1; it must be true or false"),
    ("llama", {"rope_parameters": LINEAR | {"rope_type": "dynamic", "factor": None}}, r"rope_parameters\.factor is None"),
    ("llama", {"rope_parameters": LONGROPE}, r"short_factor is .*; it must be 4 numbers"),
    ("qwen3", {"rope_parameters": LONGROPE | {"long_factor": None}}, r"long_factor is None; it must be 6 numbers"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.5}}, r"rope_parameters\.high_freq_factor is 1\.5"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": None}}, r"rope_parameters\.low_freq_factor is None"),
    ("llama", {"rope_parameters": LINEAR | {"factor": None}}, r"rope_parameters\.factor is None"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but there are 4 experts"),
    ("qwen3_moe", {"decoder_sparse_step": 9}, "none of the layers has experts"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("deepseek_v3", {"num_experts_per_tok": 3, "topk_group": 1}, "num_experts_per_tok // topk_group is 2"),
    ("deepseek_v3", {"n_group": 3}, "n_group must divide n_routed_experts=8"),
    ("deepseek_v3", {"rope_parameters": YARN_ROPE | {"mscale": None}}, r"mscale is 0 with mscale_all_dim=1"),
    ("deepseek_v3", {"rope_parameters": YARN_ROPE | {"attention_factor": 1.0}}, r"attention_factor is 1\.0"),
    ("deepseek_v3", {"rope_parameters": LINEAR}, r"rope_type is 'linear'; it must be 'default' or 'yarn'"),
    ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is None"),
    (
        "deepseek_v3",
        {"rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5; it must be 1",
    ),
    ("glm4", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("olmo2", {"attention_bias": True}, "attention_bias is True"),
    ("olmo2", {"clip_qkv": 8.0}, r"clip_qkv is 8\.0; it must be None"),
    ("olmo2", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "layer_types names other"),
    ("olmo3", {"attention_bias": True}, "attention_bias is True"),
    ("olmo3", {"rope_parameters": WIDE_YARN}, "it must have 'full_attention' and 'sliding_attention'"),
    ("olmo3", {"rope_parameters": None, "rope_theta": 1e4}, r"rope_theta is 10000\.0, which transformers 5 takes"),
    ("olmo3", {"rope_parameters": {"sliding_attention": LINEAR}}, "rope_type is 'linear'; it must be 'default'"),
    ("olmo3", {"sliding_window": None}, "layer_types has 'sliding_attention', but sliding_window is None"),
    ("gpt_oss", {"sliding_window": None}, "layer_types has 'sliding_attention', but sliding_window is None"),
    ("gemma3", {"attention_bias": True}, "attention_bias is True"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; it must be 'gelu_pytorch_tanh'"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; it must be False"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0; it must be null"),
    ("gemma3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0; it must be null"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number above 0"),
    ("gemma3", {"sliding_window": None}, "layer_types has 'sliding_attention', but sliding_window is None"),
    ("gemma3", {"rope_parameters": {"sliding_attention": LINEAR}}, "rope_type is 'linear'; it must be 'default'"),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": LLAMA3_ROPE}},
        "rope_type is 'llama3'; it must be 'default', 'linear' or",
    ),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is True"),
    ("seed_oss", {"mlp_bias": True}, "mlp_bias is True"),
    ("phi3", {"sliding_window": 8, "layer_types": WINDOWS}, "layer_types names other layers than 'sliding_attention'"),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
        "short_factor is None; it must be 4 numbers",
    ),
    ("phi3", {"rope_parameters": LINEAR}, "rope_type is 'linear'; it must be 'default' or 'longrope'"),
    (
        "smollm3",
        {"no_rope_layers": [1, 0]},
        r"no_rope_layers is \[1, 0\]; it must be a list of 1 \(rotates\) and 0 for 4 layers",
    ),
    ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers is"),
    ("smollm3", {"layer_types": WINDOWS, "sliding_window": 8}, "layer_types names other layers than 'full_attention'"),
    ("smollm3", {"mlp_bias": True}, "mlp_bias is True"),
    ("granite", {"residual_multiplier": None}, "residual_multiplier is None; it must be a number above 0"),
    ("granite", {"logits_scaling": 0}, "logits_scaling is 0; it must be a number above 0"),
    ("granite", {"attention_bias": True}, "attention_bias is True"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("glm4_moe", {"n_group": 4, "topk_group": 1}, "num_experts_per_tok // topk_group is 2"),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "so that 3 of a head's 12 dimensions rotate"),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5; it must be more than 0"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias is False; it must be True"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, r"swiglu_alpha is 1\.0; it must be 1\.702"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is of method 'fp8'"),
    ("gpt_oss", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
    ("gpt_oss", {"layer_types": WINDOWS[:2]}, "layer_types has 2 layers"),
    ("glm4_moe", {"first_k_dense_replace": 4}, "none of the layers has experts"),
    ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts is 0; it must be a positive integer"),
    ("step3p5", {"attention_bias": True}, "attention_bias is True"),
    ("step3p5", {"mlp_bias": True}, "mlp_bias is True"),
    ("step3p5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("step3p5", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; it must be False"),
    ("step3p5", {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False; it must be True"),
    ("step3p5", {"moe_router_activation": "softmax"}, "moe_router_activation is 'softmax'; it must be 'sigmoid'"),
    ("step3p5", {"norm_expert_weight": False}, "norm_expert_weight is False; it must be True"),
    ("step3p5", {"zero_centered": False}, "zero_centered is False; it must be True"),
    ("step3p5", {"sink": True}, "sink is True; it must be False"),
    ("step3p5", {"yarn_only_types": ["sliding_attention"]}, "yarn_only_types is"),
    ("step3p5", {"sparse_attention_config": {"sparse_topk_blocks": 2}}, "sparse_attention_config is"),
    ("step3p5", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ("step3p5", {"moe_router_scaling_factor": 0}, "moe_router_scaling_factor is 0; it must be a number above 0"),
    ("step3p5", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1; it must be a number above 0"),
    ("step3p5", {"mlp_layer_types": None, "moe_layers_enum": "1,two"}, "moe_layers_enum is '1,two'; it must be the numbers"),
    ("step3p5", {"num_sliding_attention_heads": 6}, "per_layer_config says .* of layer 1; it must say num_attention_heads=6"),
    ("step3p5", {"attention_other_setting": {"num_attention_groups": 1}}, "num_attention_groups is 1; it must be 2"),
    ("step3p5", {"attention_other_setting": {"head_dim": 8}}, "head_dim is 8; it must be 12"),
    ("step3p5", {"rope_theta": [1e4] * 3}, "rope_theta must have one entry for each layer"),
    (
        "step3p5",
        {"partial_rotary_factors": [1.0, 0.5, 1.0, 1.0]},
        "partial_rotary_factors must have one entry for each layer, alike",
    ),
    ("step3p5", {"n_routed_experts": 2}, "num_experts_per_tok is 3, but there are 2 experts"),
    ("step3p5", {"sliding_window": None}, "layer_types has 'sliding_attention', but sliding_window is None"),
    ("mimo_v2", {"attention_bias": True}, "attention_bias is True"),
    ("mimo_v2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("mimo_v2", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("mimo_v2", {"n_shared_experts": 1}, "n_shared_experts is 1; it must be 0"),
    ("mimo_v2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be 'sigmoid'"),
    ("mimo_v2", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is True; it must be False"),
    ("mimo_v2", {"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias is False; it must be True"),
    ("mimo_v2", {"hybrid_layer_pattern": [0, 1, 0, 0]}, r"hybrid_layer_pattern is .*; it must be \[0, 1, 1, 0\]"),
    ("mimo_v2", {"moe_layer_freq": [1] * 4}, r"moe_layer_freq is .*; it must be \[0, 1, 1, 1\]"),
    ("mimo_v2", {"swa_num_key_value_heads": 2}, "swa_num_key_value_heads is 2; it must be 4"),
    ("mimo_v2", {"swa_num_attention_heads": 8}, "swa_num_attention_heads is 8; it must be 4"),
    ("mimo_v2", {"swa_head_dim": 8}, "swa_head_dim is 8; it must be 12"),
    ("mimo_v2", {"swa_v_head_dim": 12}, "swa_v_head_dim is 12; it must be 10"),
    ("mimo_v2", {"sliding_window_size": 8}, "sliding_window_size is 8; it must be 6"),
    ("mimo_v2", {"layernorm_epsilon": 1e-6}, "layernorm_epsilon is 1e-06; it must be 1e-05"),
    ("mimo_v2", {"rope_parameters": None, "rope_theta": 1e6}, "rope_theta is 1000000.0; it must be 5000000.0"),
    ("mimo_v2", {"rope_parameters": None, "swa_rope_theta": 5e6}, "swa_rope_theta is 5000000.0; it must be 10000.0"),
    ("mimo_v2", {"rope_parameters": None, "partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0; it must be 0.334"),
    ("mimo_v2", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*; it must have 'full_attention'"),
    ("mimo_v2", {"num_key_value_heads": 4}, "layers with a window have 8 KV heads; they must divide num_attention_heads=4"),
    ("mimo_v2", {"n_routed_experts": 2}, "num_experts_per_tok is 3, but there are 2 experts"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(
    configs: Any, family: str, change: dict[str, Any], message: str
) -> None:
    hf_config = configs[family] | change
    architecture = architecture_for(hf_config)
    with pytest.raises(ModelError, match=message):
        architecture.transformer_config_kwargs(hf_config) | architecture.gpt_kwargs(hf_config)


def test_fields_that_a_config_of_glm_leaves_out_are_those_of_transformers(configs: Any) -> None:
    """Half of a head rotates, the first layer is dense, one expert is shared, one layer predicts further tokens."""
    given = configs["glm4_moe"]
    names = (
        "partial_rotary_factor",
        "rms_norm_eps",
        "first_k_dense_replace",
        "n_shared_experts",
        "attention_bias",
        "use_qk_norm",
    )
    names += ("num_nextn_predict_layers", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    bare = {name: value for name, value in given.items() if name not in names}
    bare["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    filled = transformers.Glm4MoeConfig(**{k: v for k, v in bare.items() if k != "architectures"}).to_dict()
    filled["architectures"] = given["architectures"]
    architecture = architecture_for(bare)
    assert all(name in filled for name in names)
    assert architecture.transformer_config_kwargs(bare) == architecture.transformer_config_kwargs(filled)
    assert architecture.gpt_kwargs(bare) == architecture.gpt_kwargs(filled)
    assert architecture.gpt_kwargs(bare)["rotary_percent"] == 0.5
    assert architecture.weight_map(bare).left_out == architecture.weight_map(filled).left_out == ("model.layers.4.",)
    assert torch.equal(inverse_frequencies(architecture.text_config(bare), 12), inverse_frequencies(filled, 12))


BARE = [
    "glm4",
    "olmo2",
    "olmo3",
    "gemma3",
    "phi3",
    "smollm3",
    "granite",
    "seed_oss",
    "ministral3",
    "exaone4",
    "gemma2",
    "mimo_v2",
]


@pytest.mark.parametrize("family", BARE)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(family: str) -> None:
    """A config that says no more than its sizes."""
    sizes = {name: value for name, value in SIZES.items() if name != "tie_word_embeddings"}
    sizes |= {"hidden_size": 512} if family == "glm4" else {}
    prefix = FAMILIES[family].class_prefix
    config = getattr(transformers, FAMILIES[family].config_class)
    bare = {"architectures": [f"{prefix}ForCausalLM"], "model_type": config.model_type, **sizes}
    filled = config(**sizes, pad_token_id=None).to_dict() | {"architectures": bare["architectures"]}
    architecture = architecture_for(bare)
    assert architecture.transformer_config_kwargs(bare) == architecture.transformer_config_kwargs(filled)
    assert architecture.gpt_kwargs(bare) == architecture.gpt_kwargs(filled)
    assert architecture.weight_map(bare).hf_shapes() == architecture.weight_map(filled).hf_shapes()
    ropes = [architecture.layer_rope(config) for config in (bare, filled)]
    assert ropes[0] is ropes[1] is None or ropes[0].layers == ropes[1].layers
    for config, full in zip((bare, filled), map(architecture.text_config, (bare, filled)), strict=True):
        assert torch.equal(inverse_frequencies(full, 8), inverse_frequencies(architecture.text_config(filled), 8))
        if ropes[0] is not None:
            assert torch.equal(
                inverse_frequencies(architecture.layer_rope(config).config, 8), inverse_frequencies(ropes[1].config, 8)
            )


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_rotary_parameters_of_both_kinds_of_layers_are_read_in_either_spelling(configs: Any, family: str) -> None:
    new, scaling = configs[family], {"rope_type": "linear", "factor": 3.0}
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_local_base_freq": 200.0, "rope_scaling": scaling}
    config = getattr(transformers, FAMILIES[family].config_class)(**{k: v for k, v in old.items() if k != "architectures"})
    said = config.to_dict()["rope_parameters"]
    architecture = architecture_for(old)
    for of_kind, found in (
        ("full_attention", architecture.text_config(old)),
        ("sliding_attention", architecture.layer_rope(old).config),
    ):
        parameters = {"rope_parameters": said[of_kind], "max_position_embeddings": 256}
        assert torch.equal(inverse_frequencies(found, 12), inverse_frequencies(parameters, 12))
    assert architecture.gpt_kwargs(old) == architecture.gpt_kwargs(old | {"rope_parameters": said, "rope_scaling": None})


SEE = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "kimi_k25", "qwen3_omni_moe_thinker"}
OF_MEGARL_ALONE = {
    "granite", "granitemoehybrid", "nemotron_h", "kimi_linear", "olmo_hybrid",
    "qwen3_5_moe_text", "glm4_moe", "exaone_moe", "glm4_moe_lite", "minimax_m2", "ernie4_5", "ernie4_5_moe",
    "solar_open", "afmoe", "llama4_text", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "step3p5", "gemma4_text",
    "mimo_v2_flash", "longcat_flash", *SEE,
}  # fmt: skip
"""Families of which transformers has no class with a scalar head."""


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_the_critic_of_a_family_is_a_class_that_the_family_knows(architecture: Any) -> None:
    written = sequence_classifier({"architectures": [architecture.hf_classes[0]], "model_type": architecture.name})
    assert architecture_for(written) is architecture
    assert hasattr(transformers, written["architectures"][0]) is (architecture.name not in OF_MEGARL_ALONE)


def test_kimi_k2_is_deepseek_v3_under_another_name(configs: Any) -> None:
    hf_config = configs["kimi_k2"] | {"model_type": "kimi_k2"}
    assert architecture_for(hf_config) is architecture_for(configs["deepseek_v3"])
    assert architecture_for({"model_type": "kimi_k2"}).name == "deepseek_v3"
    with pytest.raises(ModelError, match=r"model_type is 'kimi_k3', but that of .* is 'deepseek_v3' or 'kimi_k2'"):
        architecture_for(hf_config | {"model_type": "kimi_k3"})


def test_a_sliding_window_that_no_layer_uses_is_accepted(configs: Any) -> None:
    """Qwen2.5's own configs: the window is off, or starts after the last layer; Mistral's is as long as the positions."""
    hf_config = configs["qwen2"] | {"layer_types": None, "sliding_window": 64, "max_window_layers": 4}
    architecture = architecture_for(hf_config)
    plain = architecture.transformer_config_kwargs(hf_config | {"sliding_window": None})
    assert "window_size" not in plain
    assert architecture.transformer_config_kwargs(hf_config | {"use_sliding_window": True}) == plain
    assert architecture.transformer_config_kwargs(hf_config | {"use_sliding_window": False, "max_window_layers": 1}) == plain
    hf_config = configs["mistral"]
    architecture = architecture_for(hf_config)
    plain = architecture.transformer_config_kwargs(hf_config | {"sliding_window": None})
    assert architecture.transformer_config_kwargs(hf_config | {"sliding_window": 256}) == plain
    hf_config = configs["gpt_oss"] | {"layer_types": ["full_attention"] * 4, "sliding_window": None}
    assert "window_size" not in architecture_for(hf_config).transformer_config_kwargs(hf_config)
    assert architecture_for(hf_config).text_config(hf_config)["sliding_window"] is None


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3"])
def test_windows_that_a_config_leaves_out_are_those_of_transformers(configs: Any, family: str) -> None:
    names = ("sliding_window", "max_window_layers", "layer_types", "use_sliding_window")
    for given in ({}, {"use_sliding_window": True}, {"use_sliding_window": True, "max_window_layers": 3}):
        bare = {name: value for name, value in configs[family].items() if name not in names}
        bare |= {"num_hidden_layers": 30, "max_position_embeddings": 8192} | given
        model = {name: value for name, value in bare.items() if name != "architectures"}
        config = getattr(transformers, f"{FAMILIES[family].class_prefix}Config")(**model)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention" if config.sliding_window else ""] * 30
        kwargs = architecture_for(bare).transformer_config_kwargs(bare)
        found = kwargs.get("window_attn_skip_freq") or [int("window_size" in kwargs)] * 30
        assert found == [int(kind == "sliding_attention" and config.sliding_window is not None) for kind in kinds]
        assert kwargs.get("window_size", (4095, 0)) == (4095, 0)


def test_layers_with_windows_that_cannot_be_computed_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"model\.layer_spec is 'local', but this model has sliding windows"):
        check_windows("local", windows=True)
    for spec, windows in (("reference", True), ("transformer_engine", True), ("local", False)):
        check_windows(spec, windows=windows)


def test_sglang_serves_no_config_that_it_reads_otherwise(configs: Any) -> None:
    def refusal(family: str, **change: Any) -> str | None:
        return architecture_for(configs[family]).sglang.refusal(configs[family] | change)

    assert "attends to all tokens" in str(refusal("phi3", sliding_window=8, partial_rotary_factor=0.5))
    for family in ("mistral", "qwen2"):
        assert "attends to all tokens" in str(refusal(family))
    assert "attends to all tokens" in str(refusal("qwen3_moe", use_sliding_window=True, sliding_window=8, mlp_only_layers=[]))
    assert "no notice of rope_parameters.rope_type = 'linear'" in str(refusal("mixtral", rope_parameters=LINEAR))
    assert "its MLP has no biases" in str(refusal("llama", attention_bias=True, mlp_bias=True))
    assert refusal("mistral", sliding_window=None) is None
    assert refusal("qwen3") is None
    for family in ("llama", "qwen3", "glm4_moe"):
        assert "dynamic NTK" in str(refusal(family, rope_parameters=LINEAR | {"rope_type": "dynamic"}))
        assert "attention_factor" in str(refusal(family, rope_parameters=WIDE_YARN | {"attention_factor": 1.0}))
        outside = {name: value for name, value in WIDE_YARN.items() if name != "original_max_position_embeddings"}
        assert "because SGLang reads it there alone" in str(refusal(family, rope_parameters=outside))
        assert refusal(family, rope_parameters=WIDE_YARN) is None
    assert "factor otherwise" in str(refusal("llama", rope_parameters=LONGROPE | {"factor": 2.0}))


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.num_experts])
def test_routing_does_not_move_by_itself(configs: Any, family: str) -> None:
    kwargs = architecture_for(configs[family]).transformer_config_kwargs(configs[family])
    assert (kwargs["moe_aux_loss_coeff"], kwargs["moe_router_load_balancing_type"]) == (0.0, "none")
    assert kwargs.get("moe_router_bias_update_rate", 0.0) == 0.0


def test_layers_with_experts_are_those_of_transformers(configs: Any) -> None:
    def experts(family: str, **change: Any) -> Any:
        return architecture_for(configs[family]).transformer_config_kwargs(configs[family] | change)["moe_layer_freq"]

    assert experts("mixtral") == 1
    assert experts("qwen3_moe") == [1, 0, 1, 1]
    assert experts("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[]) == [0, 1, 0, 1]
    assert experts("deepseek_v3") == [0, 1, 1, 1]
    assert experts("deepseek_v3", first_k_dense_replace=0) == 1
    assert experts("glm4_moe", first_k_dense_replace=2) == [0, 0, 1, 1]


def test_models_that_see_of_text_families_are_refused_with_what_to_do() -> None:
    for name, model_type in (
        ("Qwen3_5", "qwen3_5"),
        ("Qwen3_5Moe", "qwen3_5_moe"),
        ("Gemma3", "gemma3"),
        ("Mistral3", "mistral3"),
        ("Llama4", "llama4"),
    ):
        hf_config = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": model_type, "vision_config": {}}
        with pytest.raises(ModelError, match=r"vision tower, .* save its text model as a folder of its own \(docs/vision\.md"):
            architecture_for(hf_config)


RECIPE = re.compile(r"## Train the text model alone\n.*?```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "ministral3", "mistral"])
def test_the_document_makes_the_text_model_of_a_folder_that_sees(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    text = hugging_face(family).config.to_dict()
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "depth": 1}
    more: dict[str, Any] = {}
    if family == "gemma3":
        tower = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        tower |= {"image_size": 28, "patch_size": 14}
        more = {"mm_tokens_per_image": 4, "image_token_index": 130, "boi_token_index": 128, "eoi_token_index": 129}
    if family in ("ministral3", "mistral"):
        tower = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": 8}
        tower |= {"model_type": "pixtral", "image_size": 28, "patch_size": 14}
        more = {"tie_word_embeddings": text["tie_word_embeddings"]}
    prefix = "Mistral3" if family in ("ministral3", "mistral") else FAMILIES[family].class_prefix
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=tower, **more)
    whole = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    whole.save_pretrained(tmp_path / "sees")
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "sees")
    document = (Path(__file__).parents[2] / "docs" / "vision.md").read_text(encoding="utf-8")
    [recipe] = RECIPE.findall(document)
    monkeypatch.chdir(tmp_path)
    exec(recipe.replace("Qwen3.5-27B-text", "text").replace("Qwen3.5-27B", "sees"), {})
    folder = HFFolder(tmp_path / "text")
    folder.check(architecture_for(folder.config).weight_map(folder.config))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
    ids = torch.arange(20)[None]
    assert torch.equal(read(ids).logits, whole(ids).logits)
    assert (tmp_path / "text" / "tokenizer_config.json").exists()


def test_an_unknown_architecture_names_the_known_ones_and_the_file_to_add() -> None:
    with pytest.raises(ModelError) as error:
        architecture_for({"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2"})
    for part in ("Cohere2ForCausalLM", *(a.hf_classes[0] for a in ARCHITECTURES)):
        assert part in str(error.value)
    with pytest.raises(ModelError, match=r"did you mean 'LlamaForCausalLM'"):
        architecture_for({"architectures": ["LLamaForCausalLM"], "model_type": "llama"})
    with pytest.raises(ModelError, match="model_type is 'None'"):
        architecture_for({})
    assert architecture_for({"model_type": "qwen3"}).name == "qwen3"


def test_the_document_lists_every_architecture_and_stays_short() -> None:
    text = (Path(__file__).parents[2] / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    assert {f"`{architecture.name}.py`" for architecture in ARCHITECTURES} <= set(re.findall(r"`\w+\.py`", text))
    assert sum(not line.startswith("| ") for line in text.splitlines()) < 155  # beside the rows of its tables
