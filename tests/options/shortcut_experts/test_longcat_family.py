"""LongCat-Flash: what is refused, what a config leaves out, which folders are read, and how many parameters it has."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megarl.errors import LayoutError, ModelError
from megarl.models.flops import FlopsModel
from megarl.models.registry import architecture_for
from megarl.models.shape import shape_of
from megarl.models.transformers_names import loader_of
from megarl.options.shortcut_experts.decoder_layers import placed
from megarl.options.shortcut_experts.families import ARCHITECTURES
from tests.families import SIZES, build_folder, hugging_face

LONGCAT = "longcat_flash"
REFUSED = [
    ({"attention_bias": True}, "attention_bias is True"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"router_bias": True}, "router_bias is True; it must be False"),
    ({"zero_expert_type": "drop"}, "zero_expert_type is 'drop'; it must be 'identity'"),
    ({"mla_scale_q_lora": False}, "mla_scale_q_lora is False; it must be True"),
    ({"mla_scale_kv_lora": False}, "mla_scale_kv_lora is False; it must be True"),
    ({"norm_topk_prob": True}, "norm_topk_prob is True; it must be False"),
    ({"attention_method": "MHA"}, "attention_method is 'MHA'; it must be 'MLA'"),
    ({"oe_vocab_size_ratio": 78}, "oe_vocab_size_ratio is 78; it must be None"),
    ({"head_dim": 8}, "head_dim is 8; it must be 4"),
    ({"qk_head_dim": 8}, "qk_head_dim is 8; it must be 10"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2; it must be 4"),
    ({"num_hidden_layers": 4}, "num_hidden_layers is 4; it must be 8"),
    ({"intermediate_size": 48}, "intermediate_size is 48; it must be 24"),
    ({"moe_intermediate_size": 16}, "moe_intermediate_size is 16; it must be 8"),
    ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; it must be 4"),
    ({"zero_expert_num": -1}, "zero_expert_num is -1; it must be an integer of at least 0"),
    ({"q_lora_rank": 0}, "q_lora_rank is 0; it must be a positive integer"),
    ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0; it must be a number above 0"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
]
PUBLISHED = {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "vocab_size": 131072,
    "hidden_size": 6144,
    "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048,
    "num_layers": 28,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
    "moe_topk": 12,
    "routed_scaling_factor": 6.0,
    "router_bias": False,
    "attention_method": "MLA",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "max_position_embeddings": 131072,
}
"""560 billion parameters are said of it."""


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    model = hugging_face(LONGCAT)
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    hf_config = config | change
    with pytest.raises(ModelError, match=message):
        architecture_for(hf_config).transformer_config_kwargs(hf_config)
        architecture_for(hf_config).weight_map(hf_config)


def test_what_a_config_leaves_out_is_what_transformers_fills_in() -> None:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")}
    bare = {"architectures": ["LongcatFlashForCausalLM"], "model_type": LONGCAT, **sizes}
    filled = transformers.LongcatFlashConfig(**sizes).to_dict() | {"architectures": bare["architectures"]}
    (family,) = ARCHITECTURES
    assert family.transformer_config_kwargs(bare) == family.transformer_config_kwargs(filled)
    assert family.gpt_kwargs(bare) == family.gpt_kwargs(filled)
    assert family.weight_map(bare).hf_shapes() == family.weight_map(filled).hf_shapes()
    assert family.traits(bare) == family.traits(filled)


def test_tokens_of_the_tiny_model_choose_experts_that_compute_nothing() -> None:
    """Else nothing here would see them."""
    model, chosen = hugging_face(LONGCAT), []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda module, given: chosen.append(given[1]))
    model(torch.arange(40)[None])
    counts = torch.stack([(of_layer >= 8).sum(-1) for of_layer in chosen])
    assert len(chosen) == 4
    assert set(counts.flatten().tolist()) >= {0, 1, 2}


def test_a_folder_as_the_hub_has_it_is_read(tmp_path: Path) -> None:
    """It has no rows for experts that compute nothing, for which transformers alone refuses it."""
    build_folder(LONGCAT, tmp_path / "model")
    ids = torch.arange(30)[None]
    model = loader_of(tmp_path / "model")(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    assert type(model).__module__ == "megarl.options.shortcut_experts.longcat_flash_module"
    assert torch.equal(model(ids).logits, hugging_face(LONGCAT)(ids).logits)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.LongcatFlashForCausalLM.from_pretrained(tmp_path / "model")


def test_the_module_computes_what_transformers_own_does() -> None:
    """The rows that it leaves out are never read."""
    model = hugging_face(LONGCAT)
    whole = transformers.LongcatFlashForCausalLM(model.config).float().eval()
    state: dict[str, Tensor] = dict(model.state_dict())
    for name, unused in whole.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            state[name] = torch.cat([state[name], torch.full_like(unused[8:], torch.nan)])
    whole.load_state_dict(state)
    ids = torch.arange(30)[None]
    assert torch.equal(whole(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["local", "transformer_engine"])
def test_other_layers_are_refused_by_name(config: dict[str, Any], name: str) -> None:
    own = architecture_for(config).traits(config).own_layers
    with pytest.raises(LayoutError, match=f"model.layer_spec is '{name}', but this model has layers of LongCat-Flash"):
        placed([], [0], None, own, name)  # type: ignore[arg-type]


def test_the_published_model_is_counted_and_planned_with_both_halves_of_its_layers() -> None:
    shape = shape_of(PUBLISHED)
    parameters = sum(map(prod, shape.weight_map.hf_shapes().values()))
    assert parameters / 1e9 == pytest.approx(560.665, abs=1e-3)  # 0.12 % above what is said
    assert (shape.layers, shape.attention_layers, shape.dense_layers, len(shape.expert_layers)) == (28, 56, 56, 28)
    assert shape.attention_layers * shape.cached == 56 * (512 + 64)
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    matrices = {name: prod(of) for name, of in shape.weight_map.hf_shapes().items() if len(of) == 2 and name not in tables}
    of_experts = sum(size for name, size in matrices.items() if ".experts." in name)
    zero_experts_of_routers = 28 * 256 * 6144
    used = sum(matrices.values()) - of_experts + of_experts // 512 * 12 - zero_experts_of_routers
    assert FlopsModel.of(shape).per_token == 2 * used
