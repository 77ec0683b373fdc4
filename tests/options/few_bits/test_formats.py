"""On real ranks, what is exported and sent as MXFP8, INT4 and FP8 is what the whole tensors are stored as, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.layout import Layout
from megarl.errors import EngineError, LayoutError, ModelError
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.weight_formats import engine_format, stored_format
from megarl.options.few_bits.formats import FP8, MXFP8, FewBits, int4
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.plan import plan_reshard
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.verify import verify
from tests.families import CHOOSES, FAMILIES, build_folder, hugging_face
from tests.options.few_bits.test_fp8_export import wide_folder
from tests.weights.test_execution import Collecting, given, rank_of, together
from tests.world import World

FORMATS = {"mxfp8": MXFP8, "int4": int4(32)}


def stored(folder: Path, format: FewBits) -> dict[str, torch.Tensor]:
    """The tensors of a folder as the format has them, each quantised whole."""
    from megarl.options.few_bits import fp8_blocks, mxfp8
    from megarl.options.few_bits import int4 as four_bits

    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_linear = ("_proj" in name and name.endswith(".weight")) or ".experts." in name
        if format.name != "int4" and is_linear:
            quantise_rows = mxfp8.quantise_rows if format.name == "mxfp8" else fp8_blocks.quantise_rows
            found[name], found[f"{name}_scale_inv"] = quantise_rows(tensor)
        elif format.name == "int4" and ".experts." in name:
            numbers, found[f"{name}_scale"] = four_bits.quantise_rows(tensor, format.group)
            found[f"{name}_packed"], found[f"{name}_shape"] = four_bits.packed(numbers), torch.tensor(tensor.shape)
        else:
            found[name] = tensor
    return found


def exported_and_pushed(
    rank: int, world_size: int, folder: str, layout: Layout, formats: list[FewBits], targets: list[tuple[int, int]]
) -> tuple[list[list[str]], list[Any]]:
    """(of each format what of an export is not as it must be, what each format's engines of each target are sent)."""
    from megarl.options.few_bits.quantise import FormatQuantiser
    from megarl.weights.checksums import EngineLayout

    mine, found, wrong = rank_of(rank, folder, layout, dtype="bfloat16"), [], []
    config = load_hf_config(folder)
    for format in formats:
        tensors = {name: tensor.clone() for name, tensor in mine.roles["policy"].export(FormatQuantiser(format))}
        expected = stored(Path(folder), format) if tensors else {}
        same = {
            name
            for name, tensor in tensors.items()
            if name in expected
            and tensor.dtype == expected[name].dtype
            and tensor.shape == expected[name].shape
            and torch.equal(tensor.contiguous().view(torch.uint8), expected[name].contiguous().view(torch.uint8))
        }
        pp_part = expected.keys() if layout.pp == 1 else tensors.keys()
        wrong.append(sorted((tensors.keys() | pp_part) - same))
        said = {"quantization_config": format.quantization_config(architecture_for(config).weight_map(config))}
        for tp, ep in targets:
            engine = Collecting(EngineLayout(ServedModel(config | said, "bfloat16"), EngineTarget(tp=tp, ep=ep)))
            mine.parts, mine.pusher, mine.engines = [], None, set()
            found += given(mine, {0: engine}, [{0: None}], planned=True)
    return wrong, found


WITH_SHARED_EXPERTS = ("Glm4Moe", "DeepseekV3")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("Llama", Layout(tp=2, pp=2)),
        ("Mixtral", Layout(tp=2, dp=2, ep=2, etp=2)),
        pytest.param("Mixtral", Layout(pp=2, dp=2, ep=2), marks=pytest.mark.exhaustive),
        ("Glm4Moe", Layout(tp=4, ep=2, etp=2)),  # ranks share blocks
        ("DeepseekV3", Layout(tp=4, ep=4, etp=1)),
    ],
)
def test_ranks_export_and_send_what_the_whole_tensors_are_stored_as(
    world: World, tmp_path: Path, family: str, layout: Layout
) -> None:
    folder = wide_folder(family, tmp_path / "model")
    formats = [MXFP8, *([FORMATS["int4"]] if family != "Llama" else []), *([FP8] if family in WITH_SHARED_EXPERTS else [])]
    targets = [(1, 1), (2, 2) if family != "Llama" else (2, 1), *([(4, 2)] if family == "Mixtral" else [])]
    answers = world.call(exported_and_pushed, str(folder), layout, formats, targets, size=layout.world_size)
    assert [wrong for wrong, _ in answers] == [[[]] * len(formats)] * layout.world_size
    numbered = [(format, target) for format in formats for target in targets]
    for number, (format, (tp, ep)) in enumerate(numbered):
        expected = stored(folder, format)
        plan = plan_reshard(load_hf_config(folder), layout, EngineTarget(tp=tp, ep=ep), format=format)
        verify(plan)
        assert plan.tensors.nbytes.sum() == sum(tensor.nbytes for tensor in expected.values())
        for engine_rank in range(tp):
            values, counts = together([answer[number] for _, answer in answers], 0, engine_rank)
            boxes = plan.slices(engine_rank)
            assert values.keys() == boxes.keys()
            assert {name for rank in range(tp) for name in plan.slices(rank)} == expected.keys()
            for name, (row, rows, col, cols) in boxes.items():
                whole = expected[name].double().reshape(len(expected[name]), -1)
                assert torch.equal(values[name].double(), whole[row : row + rows, col : col + cols]), (format, tp, name)
                assert bool((counts[name] == 1).all()), (format, tp, ep, engine_rank, name)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_ranks_and_engines_that_would_share_a_group_are_refused(tmp_path: Path, format: FewBits) -> None:
    config = load_hf_config(wide_folder("Mixtral", tmp_path / "model"))
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    with pytest.raises(LayoutError, match=r"16 ranks would share .* width of 256 inside groups of 32.* a multiple of 32"):
        plan_reshard(config, Layout(tp=16, etp=16, sequence_parallel=True), EngineTarget(), format=format)
    with pytest.raises(LayoutError, match=r"columns 0 to 16 of '.*', but 32 columns share a scale; use a smaller target tp"):
        plan_reshard(config, Layout(), EngineTarget(tp=16), format=format)
    with pytest.raises(ModelError, match=r"input width of 240, but in .* 32 numbers .* must be a multiple of 32"):
        plan_reshard(config | {"intermediate_size": 240}, Layout(), EngineTarget(), format=format)


CANNOT = {
    "glm4": "store several weights as one tensor",
    "phi3": "store several weights as one tensor",
    "gpt_oss": "store several weights as one tensor",
    "mistral4": "store several weights as one tensor",
    "llama4": "store several weights as one tensor",
    "qwen3_5": "has linear attention",
    "qwen3_next": "has linear attention",
    "granite_hybrid": "has linear attention",
    "nemotron_h": "has linear attention",
    "kimi_linear": "has linear attention",
    "olmo_hybrid": "has linear attention",
    "deepseek_v4": "has linear attention",
    "step3p5": "store several weights as one tensor",
    "gemma4": "store several weights as one tensor",
    "gemma4_moe": "store several weights as one tensor",
}


ENDS_OF_KEPT = (".gate.weight", ".wg.weight", ".classifier.weight", ".weights_proj.weight", "lm_head.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantised_as_a_whole_or_refused_by_name(family: str) -> None:
    """Every weight of a layer is quantised but norms, biases, routers, gates and what weighs an indexer's heads, or config.json
    names it as one that is not."""
    config = hugging_face(family).config.to_dict()
    config |= {"architectures": [f"{FAMILIES[family].class_prefix}ForCausalLM"]}
    config.pop("quantization_config", None)
    weight_map = architecture_for(config).weight_map(config)
    said = config | {"quantization_config": FP8.quantization_config(weight_map)}
    if family in CANNOT:
        with pytest.raises(EngineError, match=f"the engine's config.json: a model of family .*{CANNOT[family]}"):
            engine_format(said)
        return
    assert stored_format(said) == FP8
    kept = said["quantization_config"]["modules_to_not_convert"]
    quantised = {name for name in FP8.quantised_map(weight_map).hf_shapes() if name.endswith("_scale_inv")}
    for name, shape in weight_map.hf_shapes().items():
        in_a_layer = ".layers." in name and len(shape) == 2 and not name.endswith(CHOOSES)
        is_kept = name.removesuffix(".weight") in kept
        assert (f"{name}_scale_inv" in quantised) == (in_a_layer and not is_kept), name
        assert is_kept <= name.endswith(ENDS_OF_KEPT), name


KIMI_K2 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
}  # fmt: skip
"""What config.json of Kimi-K2-Thinking says."""


def of_kimi(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A tiny Kimi-K2 whose experts are 32 wide, with its `quantization_config` or another one."""
    if not (tmp_path / "kimi").exists():
        build_folder("kimi_k2", tmp_path / "kimi")
    return load_hf_config(tmp_path / "kimi") | {"moe_intermediate_size": 32, "quantization_config": KIMI_K2 | changes}


def test_kimi_k2s_own_config_is_read_and_others_are_refused_by_name(tmp_path: Path) -> None:
    assert engine_format(of_kimi(tmp_path)) == int4(32)
    with pytest.raises(EngineError, match=r"ignore leaves in a linear layer that is no expert's, '.*self_attn"):
        engine_format(of_kimi(tmp_path, ignore=["lm_head"]))
    with pytest.raises(EngineError, match=r"ignore leaves out an expert, '.*experts\.3\.up_proj'"):
        engine_format(of_kimi(tmp_path, ignore=[*KIMI_K2["ignore"], r"re:.*experts\.3\.up_proj"]))
    group: Any = KIMI_K2["config_groups"]
    weights = group["group_0"]["weights"]
    others = (("num_bits", 8), ("symmetric", False), ("group_size", 16), ("actorder", "group"), ("strategy", "channel"))
    for field, value in others:
        changed = {"group_0": group["group_0"] | {"weights": weights | {field: value}}}
        with pytest.raises(EngineError, match=r"says .*'compressed-tensors'.* but weights can only be sent to"):
            engine_format(of_kimi(tmp_path, config_groups=changed))
    activations = {"group_0": group["group_0"] | {"input_activations": {"num_bits": 8}}}
    with pytest.raises(EngineError, match="but weights can only be sent to"):
        engine_format(of_kimi(tmp_path, config_groups=activations))
    assert engine_format({"quantization_config": None}) is None
    assert replace(FP8, scales="power_of_two") == engine_format(
        load_hf_config(tmp_path / "kimi")
        | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}}
    )


def test_int4_of_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = load_hf_config(wide_folder("Llama", tmp_path / "model"))
    with pytest.raises(ModelError, match="int4 is for the weights of experts, and the model has none"):
        plan_reshard(config, Layout(), EngineTarget(), format=FORMATS["int4"])
