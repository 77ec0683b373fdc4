"""On real ranks, what is exported and pushed in FP8 is what quantising the whole tensors gives, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.layout import Layout
from megarl.errors import EngineError, LayoutError
from megarl.models.registry import load_hf_config
from megarl.options.few_bits.formats import FP8 as FP8_BLOCKS
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.plan import plan_reshard
from megarl.weights.sglang_targets import EngineTarget
from megarl.weights.verify import verify
from tests.families import build_folder
from tests.weights.test_execution import Collecting, given, rank_of, together
from tests.world import World


def differences(rank: int, world_size: int, folder: str, layout: Layout) -> tuple[list[str], int]:
    """On a leading rank: the tensors that are not what they must be, and how many are in FP8."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.models.packings import SCALE_SUFFIX
    from megarl.options.few_bits.formats import FP8
    from megarl.options.few_bits.fp8_blocks import quantise_rows
    from megarl.options.few_bits.quantise import FormatQuantiser

    initialize_layout(layout, seed=1)
    role = RankModel(ModelOptions(folder, layout, dtype="bfloat16"))
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in role.export():
        is_linear = (tensor.ndim == 2 and "_proj" in name) or ".experts." in name
        expected[name] = tensor.clone()
        if is_linear:
            expected[name], expected[name + SCALE_SUFFIX] = quantise_rows(tensor)
    found = {name: tensor.clone() for name, tensor in role.export(FormatQuantiser(FP8))}
    same = {
        name
        for name, tensor in found.items()
        if name in expected
        and tensor.dtype == expected[name].dtype
        and torch.equal(tensor.contiguous().view(torch.uint8), expected[name].contiguous().view(torch.uint8))
    }
    return sorted((found.keys() | expected.keys()) - same), sum(name.endswith(SCALE_SUFFIX) for name in found)


@pytest.mark.parametrize(
    ("family", "layout", "quantised"),
    [
        ("llama", Layout(tp=2, pp=2), 4 * 7),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=2, etp=2), 4 * 4 + 3 + 3 * 4 * 3),
        ("mixtral", Layout(tp=2, dp=2, ep=4, etp=1), 4 * 4 + 4 * 4 * 3),
    ],
)
def test_an_export_in_fp8_is_the_quantised_export(
    world: World, tmp_path: Path, family: str, layout: Layout, quantised: int
) -> None:
    build_folder(family, tmp_path / "model")
    answers = world.call(differences, str(tmp_path / "model"), layout, size=layout.world_size)
    assert [wrong for wrong, _ in answers] == [[]] * layout.world_size
    assert sum(count for _, count in answers) == quantised


def sent_and_exported(rank: int, world_size: int, folder: str, layout: Layout) -> list[str]:
    """What differs where every matrix of the layers is held in FP8, as a stand-in whose values lie elsewhere.

    As of Transformer Engine's tensors, of it only `dequantize` gives values that may be sent or cut.
    """
    from megarl.megatron import shards, weights
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=1)
    role = RankModel(ModelOptions(folder, layout, dtype="bfloat16"))
    arguments = (role.chunks, role.options, role.weight_map)
    names = [name for name, tensor in weights.global_tensors(role.chunks) if tensor.ndim == 2 and "layers" in name]

    def everything() -> dict[str, torch.Tensor]:
        found = {f"exported {name}": tensor.clone() for name, tensor in role.export()}
        found |= {f"in FP8 {name}": tensor.clone() for name, tensor in role.export(FormatQuantiser(FP8))}
        for at_once in (True, False):
            held = weights.local_shards(*arguments, at_once=at_once)
            assert list(held) == list(weights.local_shards(*arguments))
            assert len(held) >= len(names)
            found |= {f"sent {at_once} {name}": held[name].clone() for name in held}
            found |= {f"again {at_once} {name}": held[name].clone() for name in [*held][::-1]}
        sent = weights.local_shards(*arguments, FormatQuantiser(FP8))
        return found | {f"sent in FP8 {name}": sent[name].clone() for name in sent}

    from megarl.options.few_bits.formats import FP8
    from megarl.options.few_bits.quantise import FormatQuantiser

    expected, real = everything(), weights.global_tensors

    def in_fp8(chunks: Any) -> Any:
        for name, tensor in real(chunks):
            if name not in names:
                yield name, tensor
                continue
            held = torch.full_like(tensor, float("nan")).requires_grad_(False)
            held.dequantize = lambda values=tensor: values  # type: ignore[method-assign]
            yield name, held

    try:
        weights.global_tensors = in_fp8
        shards.is_float8tensor = lambda tensor: "dequantize" in vars(tensor)  # type: ignore[assignment]
        found = everything()
    finally:
        from megatron.core.fp8_utils import is_float8tensor

        weights.global_tensors, shards.is_float8tensor = real, is_float8tensor
    assert found.keys() == expected.keys()
    same = (name for name, tensor in found.items() if torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)))
    return sorted(found.keys() - set(same))


def test_weights_held_in_fp8_are_sent_and_exported_as_the_values_that_they_stand_for(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    assert world.call(sent_and_exported, str(tmp_path / "model"), Layout(tp=2), size=2) == [[], []]


def quantised_in_turn(rank: int, world_size: int, folder: str, layout: Layout, name: str) -> tuple[list[str], int, int]:
    """Names of what differs from what is quantised at once, in another order on each rank; parameters that are quantised, and
    the most of them that were there at the same time."""
    import weakref

    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.weights import local_shards
    from megarl.options.few_bits.formats import FORMATS
    from megarl.options.few_bits.quantise import FormatQuantiser

    initialize_layout(layout, seed=1)
    role, quantiser = RankModel(ModelOptions(folder, layout, dtype="bfloat16")), FormatQuantiser(FORMATS[name])
    arguments = (role.chunks, role.options, role.weight_map, quantiser)
    at_once = local_shards(*arguments)
    in_turn = local_shards(*arguments, at_once=False)
    suffixed = [name for name in in_turn if name.endswith(quantiser.format.suffixes[-1])]
    asked = [*in_turn][:: 1 if rank else -1]
    made: dict[str, Any] = {}
    most, wrong = 0, []
    for name in asked:
        tensor = in_turn[name]
        if name in suffixed:
            made[name] = weakref.ref(tensor.untyped_storage())
        if not torch.equal(tensor.view(torch.uint8), at_once[name].view(torch.uint8)):
            wrong.append(name)
        del tensor
        most = max(most, sum(storage() is not None for storage in made.values()))
    assert list(at_once) == list(in_turn)
    return wrong, len(suffixed), most


@pytest.mark.parametrize(
    ("family", "layout", "name"),
    [("llama", Layout(tp=2), "fp8-block"), ("kimi_k2-wide", Layout(tp=2, etp=2, sequence_parallel=True), "int4-32")],
)
def test_what_is_sent_by_and_by_is_quantised_one_parameter_at_a_time(
    world: World, tmp_path: Path, family: str, layout: Layout, name: str
) -> None:
    """Ranks ask for parameters in orders of their own, and no rank waits for another there."""
    build_folder(family, tmp_path / "model")
    for wrong, count, most in world.call(quantised_in_turn, str(tmp_path / "model"), layout, name, size=2):
        assert wrong == []
        assert count >= 8
        assert most == 1


WIDE = {"vocab_size": 131, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
"""A dense layer, and one of experts beside a shared one."""
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
"""Of DeepSeek-V3's attention; what ranks share are whole blocks, the rank of keys and values is none."""
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLAMA = WIDE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 256, "rms_norm_eps": 1e-6}


OF_FAMILY: dict[str, dict[str, Any]] = {
    "Mixtral": EXPERTS,
    "Glm4Moe": SPARSE | {"head_dim": 64, "attention_bias": True, "use_qk_norm": True},
    "DeepseekV3": SPARSE | LATENT,
}


def wide_folder(family: str, folder: Path) -> Path:
    """A model of which two ranks of an engine hold whole blocks of 128."""
    import transformers

    settings = WIDE | {"intermediate_size": 256, "tie_word_embeddings": False} | OF_FAMILY.get(family, {})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings)).bfloat16()
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("_proj.bias", "e_score_correction_bias")):  # zeros otherwise
            values.data = torch.randn(values.shape).to(torch.float32 if "correction" in name else values.dtype)
    model.save_pretrained(folder)
    return folder


def pushed_in_fp8(rank: int, world_size: int, folder: str, layout: Layout, targets: list[tuple[int, int]]) -> list[Any]:
    """What this rank, as a run drives it, sends to an FP8 engine of each of `targets` (tp, ep)."""
    from megarl.weights.checksums import EngineLayout

    mine, found = rank_of(rank, folder, layout, dtype="bfloat16"), []
    for tp, ep in targets:
        config = load_hf_config(folder) | {"quantization_config": FP8}
        engine = Collecting(EngineLayout(ServedModel(config, "bfloat16"), EngineTarget(tp=tp, ep=ep)))
        mine.parts, mine.pusher, mine.engines = [], None, set()
        found += given(mine, {0: engine}, [{0: None}], planned=True)
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("Llama", Layout(tp=4)),
        ("Llama", Layout(tp=2, pp=2)),
        ("Mixtral", Layout(tp=2, dp=2, ep=2, etp=2)),
        ("Mixtral", Layout(pp=2, dp=2, ep=2)),
    ],
)
def test_a_run_sends_an_fp8_engines_ranks_their_boxes_of_the_whole_tensors_quantised(
    world: World, tmp_path: Path, family: str, layout: Layout
) -> None:
    from megarl.models.packings import SCALE_SUFFIX
    from megarl.options.few_bits.fp8_blocks import quantise_rows

    folder = wide_folder(family, tmp_path / "model")
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        expected[name] = tensor
        if "_proj" in name or ".experts." in name:
            expected[name], expected[name + SCALE_SUFFIX] = quantise_rows(tensor)
    targets = [(1, 1), (2, 1), *([(2, 2)] if family == "Mixtral" else [])]
    answers = world.call(pushed_in_fp8, str(folder), layout, targets, size=layout.world_size)
    for number, (tp, ep) in enumerate(targets):
        plan = plan_reshard(load_hf_config(folder), layout, EngineTarget(tp=tp, ep=ep), format=FP8_BLOCKS)
        verify(plan)
        for engine_rank in range(tp):
            values, counts = together([answer[number] for answer in answers], 0, engine_rank)
            boxes = plan.slices(engine_rank)
            assert values.keys() == boxes.keys()
            assert {name for rank in range(tp) for name in plan.slices(rank)} == expected.keys()
            for name, (row, rows, col, cols) in boxes.items():
                whole = expected[name].float().reshape(len(expected[name]), -1)
                assert torch.equal(values[name], whole[row : row + rows, col : col + cols]), (tp, ep, engine_rank, name)
                assert bool((counts[name] == 1).all()), (tp, ep, engine_rank, name)


def test_an_engine_whose_ranks_would_share_a_block_is_refused(tmp_path: Path) -> None:
    folder = wide_folder("Llama", tmp_path / "model")
    with pytest.raises(LayoutError, match=r"0 to 64 of '.*_scale_inv'.*whole blocks of 128; use a smaller target tp"):
        plan_reshard(load_hf_config(folder), Layout(), EngineTarget(tp=4), format=FP8_BLOCKS)


@pytest.mark.parametrize(
    ("quantisation", "scales"),
    [(None, None), (FP8, "float"), (FP8 | {"scale_fmt": "ue8m0"}, "power_of_two")],
)
def test_how_an_engines_model_is_quantised_decides_what_it_is_sent(quantisation: Any, scales: str | None) -> None:
    format = ServedModel(LLAMA | {"quantization_config": quantisation}, "bfloat16").format
    assert (format and format.scales) == scales
    with pytest.raises(EngineError, match=r"the engine's config\.json: .* says .*'awq'.* or of quant_method 'fp8' with"):
        _ = ServedModel(LLAMA | {"quantization_config": {"quant_method": "awq"}}, "bfloat16").format
