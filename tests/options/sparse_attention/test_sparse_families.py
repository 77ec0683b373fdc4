"""Families with sparse attention: what is refused, how they are split, and how many parameters they have."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.errors import ConfigError, LayoutError, ModelError
from megarl.models import registry
from megarl.models.check_layouts import _check_layout
from megarl.models.registry import architecture_for
from megarl.models.shape import shape_of
from megarl.options.sparse_attention.attention_variant import put_into
from megarl.options.sparse_attention.families import ARCHITECTURES
from tests.families import VARIANTS, hugging_face

FULL, SHARED = "full", "shared"
V32, GLM = "deepseek_v32", "glm_moe_dsa"
REFUSED = [
    (V32, {"index_n_heads": 0}, "index_n_heads is 0; it must be a positive integer"),
    (V32, {"index_topk": 0}, "index_topk is 0; it must be a positive integer"),
    (V32, {"index_head_dim": 2}, "index_head_dim is 2; it must be at least qk_rope_head_dim=4"),
    (V32, {"q_lora_rank": None}, "q_lora_rank is None; it must be a positive integer"),
    (V32, {"indexer_rope_interleave": True}, "indexer_rope_interleave is True; it must be False"),
    (GLM, {"indexer_rope_interleave": False}, "indexer_rope_interleave is False; it must be True"),
    (V32, {"rope_interleave": False}, "rope_interleave is False; it must be True"),
    (V32, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'linear'"),
    (V32, {"indexer_types": [FULL, SHARED] * 2}, "layer 1 is to share choices of keys, as none of this family does"),
    (V32, {"index_topk_freq": 2}, "layer 2 is to share choices of keys, as none of this family does"),
    (V32, {"layer_types": ["full_attention"] * 4}, "layer_types is 'full_attention'; it must be 'indexed_attention'"),
    (V32, {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types has a dense layer behind layer 0"),
    (V32, {"mlp_layer_types": ["dense", "moe", "sparse", "sparse"]}, "mlp_layer_types names 'moe'; each entry must be 'dense'"),
    (V32, {"attention_bias": True}, "attention_bias is True"),
    (GLM, {"indexer_types": [FULL, "half", FULL, SHARED]}, "indexer_types names 'half'; each entry must be 'full' or 'shared'"),
    (GLM, {"indexer_types": [FULL] * 3}, "indexer_types has 3 entries; it must have num_hidden_layers=4"),
    (GLM, {"indexer_types": [SHARED, FULL, FULL, FULL]}, "the first layer is to share choices of keys"),
    (GLM, {"indexer_types": None, "index_topk_pattern": "FXSS"}, "index_topk_pattern names 'X'; each entry must be 'full' or"),
    (GLM, {"indexer_types": None, "index_topk_freq": 0}, "index_topk_freq is 0; it must be a positive integer"),
]


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """config.json of each family's tiny model."""
    names = [name for name, family in VARIANTS.items() if family.option == "sparse_attention"]
    models = {name: hugging_face(name) for name in names}
    return {name: model.config.to_dict() | {"architectures": [type(model).__name__]} for name, model in models.items()}


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(
    configs: Any, family: str, change: dict[str, Any], message: str
) -> None:
    hf_config = configs[family] | change
    with pytest.raises(ModelError, match=message):
        architecture_for(hf_config).transformer_config_kwargs(hf_config)


@pytest.mark.parametrize(
    "fields",
    [{}, {"index_topk_freq": 3}, {"index_topk_freq": 2, "index_skip_topk_offset": 1}, {"index_topk_pattern": "FSSFSFF"}],
)
def test_layers_share_choices_as_transformers_reads_the_fields(configs: Any, fields: dict[str, Any]) -> None:
    layers = {"num_hidden_layers": 7, "indexer_types": None, "mlp_layer_types": None, "layer_types": None}
    hf_config = configs[GLM] | layers | fields
    kinds = transformers.GlmMoeDsaConfig(**{k: v for k, v in hf_config.items() if k != "architectures"}).indexer_types
    expected = {n: max(m for m in range(n) if kinds[m] == FULL) for n, kind in enumerate(kinds) if kind == SHARED}
    assert architecture_for(hf_config).followed(hf_config) == expected
    indexers = {
        name.split(".")[2] for name in architecture_for(hf_config).weight_map(hf_config).hf_names() if "indexer" in name
    }
    assert indexers == {str(n) for n, kind in enumerate(kinds) if kind == FULL}


def test_layers_that_share_choices_are_on_one_stage(configs: Any) -> None:
    shape = shape_of(configs[GLM])
    _check_layout("policy.layout", Layout(pp=2), shape)
    apart = "has layer 1 in another model chunk than layer 0, whose results it reads"
    of_pp = f"pp is 4, which {apart}; it must be 1 or 2"
    for layout, message in (
        (Layout(pp=4), of_pp),
        (Layout(pp=2, vpp=2), f"vpp is 2, which {apart}"),
        (Layout(pp=2, first_stage_layers=1), f"first_stage_layers is 1, which {apart}"),
    ):
        with pytest.raises(ConfigError, match=rf"policy\.layout\.{message}"):
            _check_layout("policy.layout", layout, shape)
    _check_layout("policy.layout", Layout(pp=4), shape_of(configs[V32]))


def test_layers_that_are_not_the_reference_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"model\.layer_spec is 'transformer_engine', but .*; it must be 'reference'"):
        put_into(None, "transformer_engine", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "billions"), [("DeepseekV32", 671.03 + 0.85), ("GlmMoeDsa", 744.0)])
def test_the_published_model_has_as_many_parameters_as_published(name: str, billions: float) -> None:
    """transformers' default sizes are those of DeepSeek-V3.2 (DeepSeek-V3 and its indexers) and of GLM-5."""
    config = getattr(transformers, f"{name}Config")()
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    hf_config = {"architectures": [f"{name}ForCausalLM"], **config.to_dict()}
    shapes = architecture_for(hf_config).weight_map(hf_config).hf_shapes()
    biases = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert sum(map(prod, shapes.values())) == sum(parameter.numel() for parameter in model.parameters()) + biases
    assert sum(map(prod, shapes.values())) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_the_sentence_for_an_installation_without_the_option_knows_its_families() -> None:
    named = {family for family, option in registry.OPTION_OF_FAMILY.items() if option == "sparse_attention"}
    assert named == {architecture.name for architecture in ARCHITECTURES}


def test_sglang_is_refused_with_its_reason(configs: Any) -> None:
    for hf_config in configs.values():
        assert "kernels for GPUs alone" in str(architecture_for(hf_config).sglang.refusal(hf_config))
