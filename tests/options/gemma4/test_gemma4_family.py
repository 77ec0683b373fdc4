"""Gemma 4's text: what is refused, how it is split, which layers take what of which, and how many parameters it has."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.errors import ConfigError, LayoutError, ModelError
from megarl.models.check_layouts import _check_layout
from megarl.models.flops import FlopsModel
from megarl.models.packings import GroupedQKV
from megarl.models.registry import architecture_for
from megarl.models.shape import shape_of
from megarl.options.gemma4.sizes import Gemma4Layers, OwnKind
from tests.families import VARIANTS, hugging_face

FULL, WINDOW = "full_attention", "sliding_attention"
SMALL, MIXTURE = "gemma4", "gemma4_moe"
REFUSED = [
    (SMALL, {"attention_bias": True}, "attention_bias is True"),
    (SMALL, {"hidden_activation": "silu"}, "hidden_activation is 'silu'; it must be 'gelu_pytorch_tanh'"),
    (SMALL, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; it must be 'vision'"),
    (SMALL, {"vocab_size_per_layer_input": 132}, "vocab_size_per_layer_input is 132; it must be 131"),
    (SMALL, {"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; it must be less than num_hidden_layers=4"),
    (SMALL, {"num_kv_shared_layers": 3}, "no layer before these is of kind 'full_attention'"),
    (SMALL, {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
    (
        SMALL,
        {"layer_types": [WINDOW, "chunked_attention", WINDOW, FULL], "per_layer_config": None, "num_kv_shared_layers": 0},
        "has 'chunked_attention'",
    ),
    (SMALL, {"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config is .* of each layer without a window"),
    (SMALL, {"per_layer_config": {n: {"head_dim": 16, "num_attention_heads": 8} for n in "13"}}, "and nothing else"),
    (SMALL, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters is .* each with parameters of its own"),
    (SMALL, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is of method 'fp8'"),
    (MIXTURE, {"top_k_experts": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
    (MIXTURE, {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    (
        MIXTURE,
        {"num_kv_shared_layers": 1, "use_double_wide_mlp": True},
        "use_double_wide_mlp and enable_moe_block are both true",
    ),
]


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """config.json of each tiny model."""
    models = {name: hugging_face(name) for name, family in VARIANTS.items() if family.option == "gemma4"}
    return {name: model.config.to_dict() | {"architectures": [type(model).__name__]} for name, model in models.items()}


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(
    configs: Any, family: str, change: dict[str, Any], message: str
) -> None:
    hf_config = configs[family] | change
    with pytest.raises(ModelError, match=message):
        architecture_for(hf_config).transformer_config_kwargs(hf_config)


def test_another_rotation_than_transformers_has_is_refused(configs: Any) -> None:
    hf_config = configs[SMALL]
    parameters = hf_config["rope_parameters"]
    for kind, message in ((FULL, "rope_type is 'yarn'; it must be 'proportional' or 'default'"), (WINDOW, "must be 'default'")):
        other = hf_config | {"rope_parameters": parameters | {kind: {"rope_type": "yarn", "factor": 2.0}}}
        with pytest.raises(ModelError, match=message):
            architecture_for(other).gpt_kwargs(other)


def test_a_layout_must_keep_a_layer_with_the_one_whose_keys_it_takes(configs: Any) -> None:
    shape = shape_of(configs["gemma4-values"])  # layer 3 takes keys and values of layer 0
    for layout in (Layout(pp=2), Layout(pp=4), Layout(pp=2, vpp=2)):
        with pytest.raises(ConfigError, match=r"has layer 3 in another model chunk than layer 0, whose results it reads"):
            _check_layout("policy.layout", layout, shape)
    _check_layout("policy.layout", Layout(tp=2), shape)
    _check_layout("policy.layout", Layout(pp=4), shape_of(configs[MIXTURE]))


def test_inputs_of_layers_are_made_where_tokens_are_embedded(configs: Any) -> None:
    with pytest.raises(ConfigError, match=r"policy\.layout\.pp is 2, which has layer 2 in another model chunk than layer 0"):
        _check_layout("policy.layout", Layout(pp=2), shape_of(configs["gemma4-inputs"]))


def test_other_layer_specs_and_parted_chunks_are_refused_where_chunks_are_built() -> None:
    from megarl.options.gemma4.decoder_layers import placed

    own = Gemma4Layers((OwnKind(None, True, False, False), OwnKind(0, False, False, False)), 0, 10, mixture=False)
    for name in ("transformer_engine", "local"):
        with pytest.raises(LayoutError, match=f"model.layer_spec is '{name}', but this model has layers of Gemma 4"):
            placed([], [0, 1], None, own, name)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="begins with layer 1, but layer 1 reads what layer 0 computes"):
        placed([], [1], None, own, "reference")  # type: ignore[arg-type]


def test_last_layers_take_the_keys_of_the_last_one_of_their_kind(configs: Any) -> None:
    own = architecture_for(configs[SMALL]).traits(configs[SMALL] | {"num_kv_shared_layers": 1}).own_layers
    assert [kind.takes for kind in own.kinds] == [None, None, None, 1]
    assert [kind.is_taken for kind in own.kinds] == [False, True, False, False]
    assert [kind.wide for kind in own.kinds] == [False, False, False, True]
    assert own.keyless == {3}


def rotation(hf_config: dict[str, Any]) -> Any:
    """What is said of the layers with a window."""
    found = architecture_for(hf_config).layer_rope(hf_config)
    return found.layers, found.heads, found.config["rope_parameters"]


def test_published_fields_and_those_of_transformers_mean_the_same(configs: Any) -> None:
    saved = configs[MIXTURE]
    published = {name: value for name, value in saved.items() if name != "per_layer_config"}
    published |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    family = architecture_for(saved)
    assert family.weight_map(published) == family.weight_map(saved)
    assert family.transformer_config_kwargs(published) == family.transformer_config_kwargs(saved)
    assert rotation(published) == rotation(saved)


def test_what_a_config_leaves_out_is_what_transformers_fills_in() -> None:
    filled = transformers.Gemma4TextConfig().to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    bare = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    family = architecture_for(bare)
    assert family.transformer_config_kwargs(bare) == family.transformer_config_kwargs(filled)
    assert family.gpt_kwargs(bare) == family.gpt_kwargs(filled)
    assert family.weight_map(bare).hf_shapes() == family.weight_map(filled).hf_shapes()
    assert (rotation(bare), family.traits(bare)) == (rotation(filled), family.traits(filled))


def test_operations_are_those_of_the_matrices(configs: Any) -> None:
    """By hand: a layer without a window, whose keys are values, and one with a window that takes none; 4 heads."""
    shape = shape_of(configs["gemma4-values"])
    full = 32 * 16 * (4 + 4 + 4) + 3 * 32 * 24  # q, k and o, and the MLP
    window = 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 24
    taking = 32 * 16 * (4 + 4) + 3 * 32 * 24
    assert FlopsModel.of(shape).per_token == 2 * (full + 2 * window + taking)
    assert FlopsModel.of(shape).per_pair == 2 * 2 * 2 * 4 * 16
    assert FlopsModel.of(shape).per_window_pair == 2 * 2 * 2 * 4 * 8
    assert shape.kv_width(1) == 2 * 4 * 16 + 2 * 2 * 2 * 8
    assert shape.kv_width(4) == 2 * 16 + 2 * 2 * 8


def test_keys_that_are_values_are_laid_once() -> None:
    packing = GroupedQKV(4, 2, 8, 32, keys_as_values=True)
    assert packing.hf_shapes == ((32, 32), (16, 32))
    assert packing.runs(0, 1, None) == [(0, 0, 16), (1, 0, 8), (0, 16, 32), (1, 8, 16)]
    assert packing.runs(1, 2, None) == [(0, 16, 32), (1, 8, 16)]


GEMMA_4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144, "head_dim": 256,
    "global_head_dim": 512, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
}  # fmt: skip


def _config(sizes: dict[str, int], **more: Any) -> dict[str, Any]:
    return GEMMA_4 | sizes | more


PUBLISHED = {
    "gemma-4-31B": (
        _config(
            {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32},
            num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        ),
        30.7,
    ),
    "gemma-4-26B-A4B": (
        _config(
            {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16},
            num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0,
            enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        ),
        25.2,
    ),
    "gemma-4-E2B": (
        _config(
            {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8},
            num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True, hidden_size_per_layer_input=256,
            layer_types=[FULL if layer % 5 == 4 else WINDOW for layer in range(35)],
        ),
        None,
    ),
}  # fmt: skip
"""Configs, and billions of parameters as published, to their last digit; those of the smallest count a tower and audio, too."""


@pytest.mark.parametrize(("config", "billions"), PUBLISHED.values(), ids=PUBLISHED)
def test_there_are_as_many_parameters_as_published(config: dict[str, Any], billions: float | None) -> None:
    shapes = architecture_for(config).weight_map(config).hf_shapes()
    total = sum(map(prod, shapes.values()))
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**config))
    scalars = config["num_hidden_layers"]  # buffers in transformers
    assert total == sum(parameter.numel() for parameter in model.parameters()) + scalars
    assert billions is None or round(total / 1e9, 1) == billions
