"""A run whose engines serve a folder in few bits, or that rounds experts, is refused before it starts where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import parse_config, parse_supervised_config
from megarl.errors import ConfigError, MegarlError
from megarl.models.check_layouts import check_models
from megarl.models.registry import architecture_for, load_hf_config
from megarl.options.few_bits.formats import FP8, MXFP8, FewBits, int4
from megarl.planning.gpus import gpu_named
from megarl.planning.memory import Workload, precision_of, role_memory
from megarl.planning.roles import _engines, run_shape
from tests.families import build_folder


def served(folder: Path, format: FewBits, **changes: Any) -> Path:
    """The config.json alone of a model, as a folder in a format says it."""
    config = load_hf_config(folder)
    said = format.quantization_config(architecture_for(config).weight_map(config))
    target = folder.parent / f"{folder.name}-{format.name}-{format.group}"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": said | changes}))
    return target


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide"
    build_folder("kimi_k2-wide", folder)
    return folder


def config_of(folder: Path, model_path: Path | None = None, **overrides: Any) -> Any:
    tree: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": {"source": "jsonl", "path": "x"}, "max_prompt_tokens": 32},
        "rewards": [{"name": "exact_number"}],
        "rollout": {"engine": "embedded", "max_new_tokens": 16},
    }
    if model_path is not None:
        tree["rollout"]["servers"] = {"model_path": str(model_path)}
    for name, value in overrides.items():
        section, field = name.split("__")
        tree.setdefault(section, {})[field] = value
    return parse_config(tree)


SP = {"sequence_parallel": True}


def test_engines_and_training_ranks_that_agree_are_accepted(wide: Path) -> None:
    check_models(config_of(wide, served(wide, int4(32)), model__int4_experts=32, policy__layout={"tp": 2, "etp": 2, **SP}))
    check_models(config_of(wide, served(wide, int4(32))))
    check_models(config_of(wide, served(wide, FP8)))
    check_models(config_of(wide))


@pytest.mark.parametrize(
    ("format", "overrides", "message"),
    [
        (None, {"model__int4_experts": 32}, "int4_experts = 32 needs engines that serve such weights by rollout.servers"),
        (FP8, {"model__int4_experts": 32}, "--dtype int4-32` wrote, or set model.int4_experts to 0"),
        (int4(32), {"model__int4_experts": 64}, "model.int4_experts.* input width of 32, .* must be a multiple of 64"),
        (int4(128), {}, "rollout.servers.model_path.* input width of 32.* must be a multiple of 128"),
        (MXFP8, {}, "rollout.servers.model_path.* input width of 20.* must be a multiple of 32"),
        (int4(32), {"policy__layout": {"tp": 4, "etp": 4, **SP}}, "policy.layout does not go with .*model_path: 4 ranks"),
    ],
)  # fmt: skip
def test_others_are_refused_by_name(wide: Path, format: FewBits | None, overrides: dict[str, Any], message: str) -> None:
    folder = served(wide, format) if format is not None else None
    with pytest.raises(MegarlError, match=message):
        check_models(config_of(wide, folder, **overrides))


def test_models_without_experts_and_unknown_methods_are_refused(wide: Path, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "llama")
    rows: dict[str, Any] = {"model": {"path": str(tmp_path / "llama"), "dtype": "float32", "int4_experts": 32}}
    rows["data"] = {"train": {"source": "jsonl", "path": "x"}}
    with pytest.raises(MegarlError, match=r"model\.int4_experts: int4 is for the weights of experts, and the model has none"):
        check_models(parse_supervised_config(rows))
    rows["model"]["path"] = str(wide)
    check_models(parse_supervised_config(rows))  # nobody samples
    with pytest.raises(MegarlError, match=r"rollout\.servers\.model_path is '.*': config\.json: .* says .*'gptq'"):
        check_models(config_of(wide, served(wide, int4(32), quant_method="gptq")))
    with pytest.raises(ConfigError, match=r"model\.int4_experts is 32, which rounds weights that model\.fp8 = 'hybrid'"):
        config_of(wide, None, model__int4_experts=32, model__fp8="hybrid")


def test_a_plan_counts_the_bytes_of_the_format(wide: Path) -> None:
    plain, fp8, four = (_engines(config_of(wide, folder)) for folder in (None, served(wide, FP8), served(wide, int4(32))))
    weights = architecture_for(load_hf_config(wide)).weight_map(load_hf_config(wide)).hf_shapes()
    experts = sum(shape[0] * shape[1] for name, shape in weights.items() if ".experts." in name)
    tensors = sum(".experts." in name for name in weights)
    # four bits, and a bfloat16 for each 32 numbers, in the place of float32, and two whole numbers of 64 bits for each tensor
    assert plain.weight_bytes - four.weight_bytes == experts * 4 - (experts // 2 + experts // 16 + tensors * 16)
    assert four.plan.tensors.nbytes.sum() == four.weight_bytes - (plain.weight_bytes - plain.plan.tensors.nbytes.sum())
    assert fp8.weight_bytes < plain.weight_bytes


@pytest.mark.parametrize(("recompute", "layers"), [("full", 1), ("none", 3)])
def test_a_plan_counts_the_rounded_copies_that_the_backward_pass_needs(wide: Path, recompute: str, layers: int) -> None:
    """Three of the four layers have 8 experts of three matrices of 64 x 32; with `full` one layer is anew at a time."""
    work, found = Workload(tokens=4, scored=1, micro_batches=1, mean_length=4), []
    for group in (0, 32):
        config = config_of(wide, served(wide, int4(32)), model__int4_experts=group, model__recompute=recompute)
        shape = run_shape(config)
        policy = next(role for role in shape.roles if role.name == "policy")
        found.append(role_memory(policy, 0, precision_of(shape, gpu_named("h100")), work).parts["activations"])
    assert found[1] - found[0] == layers * 8 * 3 * 64 * 32 * 4
