"""What megarl reads of models that see: configs and names of both generations, processor settings, refusals, published size."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.config import parse_supervised_config
from megarl.config.layout import Layout
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError, ModelError
from megarl.models.check_layouts import check_models
from megarl.models.flops import picture_flops
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for
from megarl.models.shape import shape_of
from megarl.models.shrunk import shrunk_config
from megarl.models.transformers_names import hub_tensors as transformers_hub_tensors
from megarl.models.vision import TOWER
from megarl.planning.parameters import stage_parameters
from tests.families import build_folder
from tests.seeing import (
    SEEING,
    build_seeing_folder,
    hf_config,
    hub_tensors,
    hugging_face,
    seen_by,
    tower_grids,
    tower_modules,
    vision_of,
)

QWEN2_TEXT = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "image_token_id": 151655,
    "video_token_id": 151656,
}
"""What the hub's flat configs of Qwen2-VL and Qwen2.5-VL have in common."""


def qwen2_5_vl(
    hidden: int, ffn: int, layers: int, heads: int, groups: int, vocab: int, tower_ffn: int, **more: Any
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocab}
    tower = {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": tower_ffn, "num_heads": 16}
    tower |= {"in_chans": 3, "out_hidden_size": hidden, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14}
    tower |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2}
    names = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vision_config": tower}
    return QWEN2_TEXT | sizes | names | {"num_attention_heads": heads, "num_key_value_heads": groups} | more


def qwen2_vl(hidden: int, ffn: int, layers: int, heads: int, groups: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocab}
    tower = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": hidden}
    tower |= {"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}
    names = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vision_config": tower}
    return QWEN2_TEXT | sizes | names | {"num_attention_heads": heads, "num_key_value_heads": groups} | more


def qwen3_vl(text: dict[str, Any], tower: dict[str, Any], *, moe: str = "") -> dict[str, Any]:
    rope = {
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5e6,
    }
    common = {
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
    }
    of_tower = {"depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
    of_tower |= {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    of_tower |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}
    return {
        "architectures": [f"Qwen3VL{moe}ForConditionalGeneration"],
        "model_type": f"qwen3_vl{'_' + moe.lower() if moe else ''}",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "tie_word_embeddings": False,
        "text_config": common | rope | text,
        "vision_config": of_tower | tower,
    }


EXAMPLES = Path(__file__).parents[2] / "examples/models"
OF_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
OF_30B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PUBLISHED = {
    "Qwen2-VL-2B": (qwen2_vl(1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True), 2_208_985_600),
    "Qwen2-VL-7B": (qwen2_vl(3584, 18944, 28, 28, 4, 152064), 8_291_375_616),
    "Qwen2.5-VL-3B": (qwen2_5_vl(2048, 11008, 36, 16, 2, 151936, 3420, tie_word_embeddings=True), 3_754_622_976),
    "Qwen2.5-VL-7B": (qwen2_5_vl(3584, 18944, 28, 28, 4, 152064, 3420), 8_292_166_656),
    "Qwen2.5-VL-72B": (qwen2_5_vl(8192, 29568, 80, 64, 8, 152064, 3456), 73_410_777_344),
    "Qwen3-VL-8B": (qwen3_vl(OF_8B, {"out_hidden_size": 4096}), 8_767_123_696),
    "Qwen3-VL-30B-A3B": (qwen3_vl(OF_30B, {"out_hidden_size": 2048}, moe="Moe"), 31_070_754_032),
    "Kimi-K2.5": (json.loads((EXAMPLES / "kimi-k2.5/config.json").read_text()), 1_026_879_376_368),
}
"""The hub's configs, and how many parameters its pages say the checkpoints have."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_map_of_a_full_size_config_has_as_many_parameters_as_the_hub_says(name: str) -> None:
    config, published = PUBLISHED[name]
    architecture = architecture_for(config)
    assert sum(map(prod, architecture.weight_map(config).hf_shapes().values())) == published
    architecture.transformer_config_kwargs(config)
    architecture.gpt_kwargs(config)


def glm_4_5v() -> dict[str, Any]:
    """GLM-4.5V's sizes as transformers 4 writes them, and a layer for multi-token prediction."""
    text = {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 65536,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"mrope_section": [8, 12, 12], "type": "default"},
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    }
    tower = {"depth": 24, "hidden_act": "silu", "hidden_size": 1536, "image_size": 336, "in_channels": 3, "num_heads": 12}
    tower |= {"intermediate_size": 10944, "out_hidden_size": 4096, "patch_size": 14, "rms_norm_eps": 1e-5}
    tower |= {"attention_bias": False, "spatial_merge_size": 2, "temporal_patch_size": 2}
    names = {"architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe"}
    return names | {"image_token_id": 151363, "video_token_id": 151364, "text_config": text, "vision_config": tower}


def test_the_map_of_a_full_size_glm_names_what_transformers_has() -> None:
    import transformers

    config = glm_4_5v()
    with torch.device("meta"):
        model = transformers.Glm4vMoeForConditionalGeneration(transformers.Glm4vMoeConfig(**copy.deepcopy(config)))
    expected = {name: tuple(tensor.shape) for name, tensor in transformers_hub_tensors(model).items()}
    weight_map = architecture_for(config).weight_map(config)
    assert weight_map.hf_shapes() == expected
    assert weight_map.leaves_out("model.language_model.layers.46.eh_proj.weight")
    assert not weight_map.leaves_out("model.language_model.layers.45.mlp.gate.weight")


def test_a_full_size_kimi_has_as_many_parameters_as_transformers_makes_of_its_config() -> None:
    import transformers

    config, published = PUBLISHED["Kimi-K2.5"]
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**copy.deepcopy(config)))
    picks = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(tensor.numel() for tensor in (*model.parameters(), *picks)) == published
    vision = architecture_for(config).vision(config)
    assert vision is not None
    assert vision.parameters == sum(p.numel() for module in tower_modules(model) for p in module.parameters()) == 471_143_920


FULL_SIZE = {name: config for name, (config, _) in PUBLISHED.items()} | {"GLM-4.5V": glm_4_5v()}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_config_means_the_same_as_transformers_5_writes_it(name: str) -> None:
    import transformers

    config = FULL_SIZE[name]
    written = transformers.AutoConfig.for_model(**copy.deepcopy(config)).to_dict() | {"architectures": config["architectures"]}
    assert "text_config" in written
    architecture = architecture_for(config)
    assert architecture.weight_map(written) == architecture.weight_map(config)
    assert architecture.transformer_config_kwargs(written) == architecture.transformer_config_kwargs(config)
    assert architecture.gpt_kwargs(written) == architecture.gpt_kwargs(config)
    assert architecture.vision(written) is not None
    assert architecture.vision(written) == architecture.vision(config)


@pytest.mark.parametrize("family", SEEING)
def test_windows_of_a_decoder_are_those_of_transformers_or_refused(family: str) -> None:
    """transformers has some in Qwen2-VL and Qwen2.5-VL."""
    config = hf_config(family).to_dict() | {"architectures": [f"{SEEING[family].class_prefix}ForConditionalGeneration"]}
    text = {name: value for name, value in config["text_config"].items() if name not in ("layer_types", "sliding_window")}
    architecture = architecture_for(config)
    for given in ({}, {"max_window_layers": 1}, {"max_window_layers": 1, "sliding_window": 5}):
        asked = config | {"text_config": {"use_sliding_window": True, "num_hidden_layers": 90} | text | given}
        asked["text_config"] |= {"use_sliding_window": True, "max_position_embeddings": 8192}
        if family not in ("qwen2_vl", "qwen2_5_vl"):
            continue
        read = type(hf_config(family))(**asked).text_config
        kwargs = architecture.transformer_config_kwargs(asked)
        of_layers = kwargs.get("window_attn_skip_freq") or [int("window_size" in kwargs)] * read.num_hidden_layers
        assert of_layers == [int(kind == "sliding_attention") for kind in read.layer_types]
        assert kwargs.get("window_size", (read.sliding_window - 1, 0)) == (read.sliding_window - 1, 0)
    if family.startswith("qwen3"):
        asked = config | {"text_config": text | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}}
        with pytest.raises(ModelError, match="transformers' decoder of this family attends to all tokens"):
            architecture.transformer_config_kwargs(asked)


@pytest.mark.parametrize("family", SEEING)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str) -> None:
    import transformers

    full = hf_config(family).to_dict()
    least = {"model_type": family, "architectures": [f"{SEEING[family].class_prefix}ForConditionalGeneration"]}
    default = transformers.AutoConfig.for_model(family)
    written = default.to_dict() | {"architectures": least["architectures"]}
    # the defaults of two of the classes' own towers and decoders do not fit each other
    width = {"hidden_size" if family == "qwen2_vl" else "out_hidden_size": default.text_config.hidden_size}
    width = {} if family == "kimi_k25" else width
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    of_experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")
    names = (*sizes, "max_position_embeddings", *of_experts)
    text = {name: value for name, value in written["text_config"].items() if name in names}
    if text["hidden_size"] % text["num_attention_heads"]:  # as the defaults of GLM's decoder, whose checkpoints say this
        text["head_dim"] = written["text_config"]["head_dim"] = 128
    given = least | {"text_config": text, "vision_config": width}
    written["vision_config"] |= width
    architecture = architecture_for(full)
    assert architecture.weight_map(given) == architecture.weight_map(written)
    assert architecture.transformer_config_kwargs(given) == architecture.transformer_config_kwargs(written)
    assert architecture.gpt_kwargs(given) == architecture.gpt_kwargs(written)
    assert architecture.vision is not None
    assert architecture.vision(given) == architecture.vision(written)


OTHER_NAMES = {
    "qwen2_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "qwen2_5_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "qwen3_vl": {"model.visual.": "visual.", "model.language_model.": "model."},
}
"""The hub's names, and those of the other generation."""


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_names_of_both_generations_are_read(family: str, tmp_path: Path) -> None:
    build_seeing_folder(family, tmp_path / "hub")
    hub = HFFolder(tmp_path / "hub")
    renamed = {}
    for name in hub.names:
        old = next((prefix for prefix in OTHER_NAMES[family] if name.startswith(prefix)), "")
        renamed[OTHER_NAMES[family].get(old, "") + name.removeprefix(old)] = hub.get_slice(name)[...]
    write_hf_folder(tmp_path / "other", renamed.items(), hub.config, max_shard_bytes=2**16)
    other = HFFolder(tmp_path / "other")
    assert sorted(other.names) == sorted(hub.names)
    assert sorted(other.entries()) == sorted(hub.names)
    for name in hub.names:
        assert torch.equal(other.get_slice(name)[...], hub.get_slice(name)[...])
    other.check(architecture_for(hub.config).weight_map(hub.config))


def test_a_folder_that_has_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    build_seeing_folder("qwen2_vl", tmp_path / "hub")
    hub = HFFolder(tmp_path / "hub")
    tensors = {name: hub.get_slice(name)[...] for name in hub.names}
    write_hf_folder(tmp_path / "both", [*tensors.items(), ("model.language_model.norm.weight", torch.zeros(32))], hub.config)
    with pytest.raises(ModelError, match=r"tensor 'model\.(language_model\.)?norm\.weight' in .* is there again as 'model\."):
        HFFolder(tmp_path / "both").get_slice("model.norm.weight")


@pytest.mark.parametrize("family", SEEING)
def test_transformers_saves_and_loads_the_hubs_names(family: str, tmp_path: Path) -> None:
    """What `save_pretrained` writes is what `hub_tensors` says, and what megarl writes is what `from_pretrained` reads."""
    import transformers

    model = hugging_face(family)
    model.save_pretrained(tmp_path / "saved")
    saved = HFFolder(tmp_path / "saved")
    expected = hub_tensors(family, model)
    assert sorted(saved.entries()) == sorted(expected)
    build_seeing_folder(family, tmp_path / "built")
    loaded, info = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "built", output_loading_info=True)
    assert not any(info.values()), info
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    built = HFFolder(tmp_path / "built")
    assert (
        sorted(saved.names) == sorted(built.names) == sorted(architecture_for(built.config).weight_map(built.config).hf_names())
    )
    for folder in (saved, built):  # of which transformers' own has matrices of experts transposed
        folder.check(architecture_for(folder.config).weight_map(folder.config))
        assert all(torch.equal(folder.get_slice(name)[:], built.get_slice(name)[...]) for name in folder.names)


def test_an_experts_tensors_are_parts_of_the_stored_ones(tmp_path: Path) -> None:
    """By hand, whole and in slices, as the hub stores them and as transformers does."""
    model = hugging_face("qwen3_vl_moe")
    build_seeing_folder("qwen3_vl_moe", tmp_path / "hub")
    model.save_pretrained(tmp_path / "saved")
    for folder in (HFFolder(tmp_path / "hub"), HFFolder(tmp_path / "saved")):
        for layer, expert in ((0, 0), (2, 3)):
            experts = model.model.language_model.layers[layer].mlp.experts
            gate, up = experts.gate_up_proj[expert].chunk(2)
            for part, whole in (("gate", gate), ("up", up), ("down", experts.down_proj[expert])):
                found = folder.get_slice(f"model.language_model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight")
                assert found.get_shape() == list(whole.shape)
                assert torch.equal(found[:], whole)
                assert torch.equal(found[3:7], whole[3:7])
                assert torch.equal(found[:, 2:9], whole[:, 2:9])


def test_experts_that_are_missing_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    build_seeing_folder("qwen3_vl_moe", tmp_path / "hub")
    hub = HFFolder(tmp_path / "hub")
    tensors = {name: hub.get_slice(name)[:].contiguous() for name in hub.names}
    gone = "model.language_model.layers.0.mlp.experts.2.up_proj.weight"
    with pytest.raises(ModelError, match=f"gate_up_proj' cannot be written without '{gone}'"):
        write_hf_folder(tmp_path / "less", [item for item in tensors.items() if item[0] != gone], hub.config)
    stored = "model.language_model.layers.0.mlp.experts.down_proj"
    others = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp.experts" not in name or ".down" not in name}
    write_hf_folder(tmp_path / "other", (others | {stored: torch.zeros(4, 12, 31)}).items(), hub.config)
    with pytest.raises(ModelError, match=r"has shape \[4, 12, 31\], but config.json implies \[4, 12, 32\] or, as transformers"):
        HFFolder(tmp_path / "other").get_slice("model.language_model.layers.0.mlp.experts.1.down_proj.weight")


REFUSED = [
    *(
        ("kimi_k25", *refused)
        for refused in (
            ({"vision_config": {"num_attention_heads": 3}}, "num_attention_heads is 3; it must divide hidden_size = 16 into"),
            (
                {"projection_hidden_size": 32},
                "projection_hidden_size is 32; it must be 16: the projector's norm is over a patch's fea",
            ),
            ({"projection_hidden_size": None}, "hidden_size is 16; it must be 1152: projection_hidden_size has this default"),
            (
                {"vision_config": {"pos_emb_width": 6}},
                "pos_emb_width is 6; it must be 5: transformers looks positions up in a square",
            ),
            ({"vision_config": {"merge_kernel_size": [2, 1]}}, r"merge_kernel_size is \[2, 1\]; it must be two equal numbers"),
            (
                {"vision_config": {"vt_hidden_size": 32}},
                "vt_hidden_size is 32; it must be 16: transformers reads hidden_size alone",
            ),
            ({"vision_config": {"merge_type": "sum"}}, "merge_type is 'sum'; it must be 'sd2_tpool'"),
            ({"vision_config": {"projector_ln_eps": 1e-6}}, "projector_ln_eps is 1e-06; it must be 1e-05"),
            (
                {"media_placeholder_token_id": 7},
                "media_placeholder_token_id is 7; it must be 120: transformers reads image_token_id",
            ),
            ({"text_config": {"model_type": "llama"}}, "model_type is 'llama'; it must be 'deepseek_v3'"),
            ({"text_config": {"rope_interleave": False}}, "rope_interleave is False; it must be True"),
        )
    ),
    (
        "qwen2_vl",
        {"vision_config": {"hidden_size": 64}},
        "the tower's features have 64 numbers, but the decoder's hidden_size is 32",
    ),
    ("qwen2_vl", {"vision_config": {"in_chans": 4}}, "in_chans is 4; it must be 3: transformers reads in_channels alone"),
    ("qwen2_vl", {"vision_config": {"depth": 0}}, "depth is 0; it must be a positive integer"),
    ("qwen2_5_vl", {"vision_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'; it must be 'silu'"),
    ("qwen2_5_vl", {"vision_config": 3}, "vision_config is 3; it must be an object"),
    (
        "qwen2_5_vl",
        {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 2]}}},
        "add up to half of a head's 8 dimensions",
    ),
    (
        "qwen2_5_vl",
        {"text_config": {"rope_parameters": {"mrope_interleaved": True}}},
        "mrope_interleaved is True; it must be False",
    ),
    ("qwen2_5_vl", {"text_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'; it must be"),
    ("qwen2_5_vl", {"image_token_id": "x"}, "image_token_id is 'x'; it must be an integer of at least 0"),
    (
        "qwen3_vl",
        {"text_config": {"rope_parameters": {"mrope_interleaved": False}}},
        "mrope_interleaved is False; it must be True",
    ),
    ("qwen3_vl", {"text_config": {"rope_parameters": {"mrope_section": [1, 2, 3]}}}, "must begin with the largest"),
    (
        "qwen3_vl",
        {"vision_config": {"deepstack_visual_indexes": [1, 0]}},
        "must be some of the tower's 3 layers, in their order",
    ),
    ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [3]}}, "must be some of the tower's 3 layers, in their order"),
    ("qwen3_vl_moe", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob is False; it must be True"),
    ("qwen3_vl", {"text_config": {"attention_bias": True}}, "attention_bias is True; it must be False"),
    ("glm4v_moe", {"text_config": {"use_qk_norm": True}}, "use_qk_norm is True; it must be False"),
    ("glm4v_moe", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob is False; it must be True"),
    (
        "glm4v_moe",
        {"text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}}},
        "add up to half of a head's 8 dimensions that rotate",
    ),
    ("glm4v_moe", {"text_config": {"rope_parameters": {"partial_rotary_factor": 0.6}}}, "so that 9 of a head's 16 dimensions"),
    ("glm4v_moe", {"vision_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'; it must be 'silu'"),
    ("glm4v_moe", {"vision_config": {"image_size": [70, 70]}}, r"image_size is \[70, 70\]; it must be a positive integer"),
    ("glm4v_moe", {"vision_config": {"out_hidden_size": 64}}, "features have 64 numbers, but the decoder's hidden_size is 32"),
]


@pytest.mark.parametrize(("family", "change", "sentence"), REFUSED)
def test_what_cannot_be_represented_is_refused(family: str, change: dict[str, Any], sentence: str) -> None:
    config = hf_config(family).to_dict()

    def changed(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        return before | {
            name: changed(before[name], value) if isinstance(value, dict) else value for name, value in new.items()
        }

    architecture = architecture_for(config)
    architecture.weight_map(config)
    with pytest.raises(ModelError, match="config.json: .*" + sentence):
        for read in (architecture.weight_map, architecture.transformer_config_kwargs, architecture.gpt_kwargs):
            read(changed(config, change))


@pytest.mark.parametrize("family", SEEING)
def test_the_small_model_of_a_rehearsal_rotates_by_as_many_positions(family: str) -> None:
    small = shrunk_config(hf_config(family).to_dict(), [Layout()], engine_ranks=1, engine_ep=1, vocab_size=1000)
    vision = shape_of(small).vision  # sections that do not fit a head are refused
    assert vision is not None
    assert vision.mrope is None or min(vision.mrope.sections) > 0
    assert (vision.mrope is None) == (family == "kimi_k25")


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 8, 10), (2, 6, 2)])
def test_operations_of_a_picture_are_those_that_torch_counts(family: str, grid: tuple[int, int, int]) -> None:
    """Windows at the edges of a picture are smaller ones."""
    model, vision = hugging_face(family), vision_of(family)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        seen_by(model, torch.randn(prod(grid), *vision.patch_shape), torch.tensor(tower_grids(family, [grid])))
    assert counter.get_total_flops() == picture_flops(vision, grid)


@pytest.mark.parametrize("family", SEEING)
def test_the_first_stage_holds_the_whole_tower_on_every_tensor_rank(family: str) -> None:
    shape = shape_of(hf_config(family).to_dict())
    assert shape.vision is not None
    tower = sum(map(prod, shape.vision.shapes.values()))
    assert tower == sum(p.numel() for module in tower_modules(hugging_face(family)) for p in module.parameters())
    layout = Layout(tp=2, pp=2, etp=2, sequence_parallel=True)
    without = replace(shape.weight_map, rules=tuple(r for r in shape.weight_map.rules if not r.megatron_name.startswith(TOWER)))
    for stage, (counted, of_decoder) in enumerate(
        zip(stage_parameters(shape, layout), stage_parameters(replace(shape, weight_map=without), layout), strict=True)
    ):
        assert counted.dense - of_decoder.dense == (tower if stage == 0 else 0)


@pytest.mark.parametrize(
    ("family", "freeze", "sentence"),
    [
        ("qwen2_5_vl", "[vision, language]", None),
        (
            "qwen2_5_vl",
            "[vision, projector, language]",
            "policy.freeze is .*, which leaves nothing to train; it must",
        ),
        ("qwen2_5_vl", "[tower]", r"policy.freeze is \['tower'\], which names 'tower', a pattern of no tensor of the model"),
        (
            "qwen2",
            "[vision]",
            "policy.freeze is .*, which names 'vision', a part of a vision-language model, and this one only reads",
        ),
    ],
)
def test_parts_to_freeze_are_checked_before_a_run(family: str, freeze: str, sentence: str | None, tmp_path: Path) -> None:
    (build_seeing_folder if family in SEEING else build_folder)(family, tmp_path / "model")
    base = {"model": {"path": str(tmp_path / "model")}, "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}}}
    with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
        check_models(parse_supervised_config(apply_overrides(base, [f"policy.freeze={freeze}"])))


def test_a_layout_that_deepstack_does_not_fit_is_refused_before_a_run(tmp_path: Path) -> None:
    build_seeing_folder("qwen3_vl", tmp_path / "model")
    base = {"model": {"path": str(tmp_path / "model")}, "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}}}
    config = parse_supervised_config(apply_overrides(base, ["policy.layout={pp: 2, first_stage_layers: 1}"]))
    with pytest.raises(ConfigError, match=r"first_stage_layers is 1, which leaves 1 of the layers .* at least 2"):
        check_models(config)
