"""Transformer Engine's real layers, built without a GPU: weights in and out, checkpoints, recipes. None of them computes.

`make test-transformer-engine` has an environment for it; elsewhere all of this is skipped. What the layers compute is tested
in tests/themes/gpu.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.fp8 import token_multiple
from megarl.config.layout import Layout
from megarl.errors import CheckpointError
from megarl.megatron.options import ModelOptions, OptimizerOptions
from tests.families import FAMILIES, UNDER_TRANSFORMER_ENGINE, build_folder, hub_tensors, hugging_face
from tests.megatron.moments import assert_equal, everything, merged
from tests.megatron.saving import load_role, save_role
from tests.world import REPOSITORY, World

pytestmark = pytest.mark.slow
ENGINE, REFERENCE = "transformer_engine", "reference"
ADAM = OptimizerOptions(lr=1e-2, eps=1e-3, weight_decay=0.1, total_steps=10)
RECIPES = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}


def model(folder: Path, layer_spec: str = ENGINE, layout: Layout | None = None, **options: Any) -> Any:
    """A role on this rank, with an optimizer unless `trainable` is false."""
    from megatron.core import parallel_state

    from megarl.megatron.build import initialize_layout
    from megarl.megatron.rank_model import RankModel

    layout = layout or Layout()
    if not parallel_state.model_parallel_is_initialized():
        initialize_layout(layout, seed=1)
    chosen = ModelOptions(str(folder), layout, layer_spec=layer_spec, **options)
    return RankModel(chosen, ADAM if chosen.trainable else None)


# --- weights ----------------------------------------------------------------------------------------------------------


def exported(rank: int, world_size: int, folder: Path, layout: Layout) -> dict[str, dict[str, Tensor]]:
    from tests.megatron.engine_on_cpu import a_gpu

    with a_gpu():
        role = model(folder, layout=layout, trainable=False)
        layers = {type(module).__module__ for chunk in role.chunks for module in chunk.modules()}
        assert "megatron.core.extensions.transformer_engine" in layers
        return {"weights": {name: tensor.clone() for name, tensor in role.export()}}


SPLIT = {"tp2+sp": Layout(tp=2, sequence_parallel=True), "pp2": Layout(pp=2), "ep2": Layout(dp=2, ep=2)}
CELLS = [(family, "one", Layout()) for family in UNDER_TRANSFORMER_ENGINE]
CELLS += [
    (family, name, SPLIT[name]) for family in FAMILIES if family in UNDER_TRANSFORMER_ENGINE for name in ("tp2+sp", "pp2")
]
CELLS += [(f, "ep2", SPLIT["ep2"]) for f, of in FAMILIES.items() if f in UNDER_TRANSFORMER_ENGINE and of.num_experts]


@pytest.mark.parametrize(("family", "layout"), [pytest.param(f, at, id=f"{f}-{name}") for f, name, at in CELLS])
def test_weights_go_in_and_out_bit_for_bit(engine_world: World, family: str, layout: Layout, tmp_path: Path) -> None:
    build_folder(family, tmp_path / "model")
    answers = engine_world.call(exported, tmp_path / "model", layout, size=layout.world_size)
    assert_equal(merged(answers, "weights"), hub_tensors(hugging_face(family)))


def value_head(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    from megarl.megatron.weights import SCORE
    from tests.megatron.engine_on_cpu import a_gpu

    with a_gpu():
        return [list(tensor.shape) for name, tensor in model(folder, head="value").export() if name == SCORE]


@pytest.mark.parametrize("family", UNDER_TRANSFORMER_ENGINE)
def test_a_critic_is_built(engine_world: World, family: str, tmp_path: Path) -> None:
    build_folder(family, tmp_path / "model")
    assert engine_world.call(value_head, tmp_path / "model", size=1)[0] == [[1, 32]]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def train(role: Any) -> None:
    """Two updates on random gradients."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        for chunk in role.chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.main_grad.copy_(gradient)
        role.scheduler.step(1)
        role.optimizer.step()


def saved(rank: int, world_size: int, folder: Path, spec: str, options: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    from tests.megatron.engine_on_cpu import a_gpu

    with a_gpu():
        role = model(folder, spec, **options)
        train(role)
        save_role(role, checkpoint)
        return _state(role)


def loaded(rank: int, world_size: int, folder: Path, spec: str, options: dict[str, Any], checkpoint: str) -> Any:
    from tests.megatron.engine_on_cpu import a_gpu

    with a_gpu():
        role = model(folder, spec, **options)
        try:
            load_role(role, checkpoint)
        except CheckpointError as error:
            return str(error)
        return _state(role)


def _state(role: Any) -> dict[str, Any]:
    from megarl.megatron.optimizer_state import step_of

    return {"tensors": everything(role), "step": step_of(role.optimizer), "lr": role.optimizer.param_groups[0]["lr"]}


DIRECTIONS = [(ENGINE, REFERENCE), (REFERENCE, ENGINE), (ENGINE, ENGINE)]


@pytest.mark.parametrize(("source", "target"), DIRECTIONS, ids=["written by it", "read by it", "both"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "float32") for family in UNDER_TRANSFORMER_ENGINE),
        *((family, "bfloat16") for family in ("llama", "mixtral", "deepseek_v3")),
    ],
)
def test_weights_and_moments_are_read_under_another_layer_spec(
    engine_world: World, family: str, source: str, target: str, dtype: str, tmp_path: Path
) -> None:
    build_folder(family, tmp_path / "model")
    arguments = ({"dtype": dtype}, str(tmp_path / "checkpoint"))
    before = engine_world.call(saved, tmp_path / "model", source, *arguments, size=1)[0]
    after = engine_world.call(loaded, tmp_path / "model", target, *arguments, size=1)[0]
    assert before["step"] == after["step"] == 2
    assert before["lr"] == after["lr"]
    assert all(float(tensor.abs().sum()) > 0 for name, tensor in before["tensors"].items() if "exp_avg" in name)
    assert_equal(after["tensors"], before["tensors"])


@pytest.mark.parametrize("spec", [ENGINE, REFERENCE])
def test_a_tensor_that_the_checkpoint_lacks_is_one_sentence(engine_world: World, spec: str, tmp_path: Path) -> None:
    for family in ("llama", "mixtral"):
        build_folder(family, tmp_path / family)
    checkpoint = str(tmp_path / "checkpoint")
    engine_world.call(saved, tmp_path / "llama", spec, {}, checkpoint, size=1)
    sentence = engine_world.call(loaded, tmp_path / "mixtral", ENGINE, {}, checkpoint, size=1)[0]
    assert sentence.startswith(f"'{checkpoint}' has no tensor '")
    assert "\n" not in sentence


# --- FP8 --------------------------------------------------------------------------------------------------------------


def fp8(recipe: str) -> dict[str, Any]:
    kind = RECIPES[recipe]
    return {"dtype": "bfloat16", "fp8": kind, "fp8_recipe": recipe, "token_multiple": token_multiple(kind, recipe)}


def recipe_of(rank: int, world_size: int, folder: Path, recipe: str) -> str:
    """The class of the recipe that megatron-core gives to Transformer Engine's layers."""
    from megatron.core.fp8_utils import get_fp8_recipe

    from tests.megatron.engine_on_cpu import BLACKWELL, HOPPER, a_gpu

    with a_gpu(BLACKWELL if recipe == "mxfp8" else HOPPER):
        chunk = model(folder, **fp8(recipe)).chunks[0]
        return next(
            base.__name__
            for base in type(get_fp8_recipe(chunk.config)).__mro__
            if "transformer_engine.common" in base.__module__
        )


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("delayed", "DelayedScaling"),
        ("tensorwise", "Float8CurrentScaling"),
        ("blockwise", "Float8BlockScaling"),
        ("mxfp8", "MXFP8BlockScaling"),
    ],
)
@pytest.mark.parametrize("family", UNDER_TRANSFORMER_ENGINE)
def test_every_recipe_is_accepted(engine_world: World, family: str, recipe: str, name: str, tmp_path: Path) -> None:
    build_folder(family, tmp_path / "model")
    assert engine_world.call(recipe_of, tmp_path / "model", recipe, size=1)[0] == name


def scales_after_resuming(rank: int, world_size: int, folder: Path, checkpoint: str) -> list[dict[str, Tensor]]:
    """Of every layer in FP8, what delayed scaling remembers: before a checkpoint is written and after it is read."""
    from tests.megatron.engine_on_cpu import a_gpu

    with a_gpu():
        first, second = (model(folder, **fp8("delayed")) for _ in range(2))
        generator = torch.Generator().manual_seed(5)
        for tensor in _scales(first, make=True).values():
            tensor.uniform_(generator=generator)
        save_role(first, checkpoint)
        load_role(second, checkpoint)
        return [_scales(role, make=False) for role in (first, second)]


def _scales(role: Any, *, make: bool) -> dict[str, Tensor]:
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.utils import unwrap_model

    core, found = unwrap_model(role.chunks[0]), {}
    for name, module in core.named_modules():
        if not hasattr(module, "fp8_meta") or name.endswith("core_attention"):
            continue
        if make:
            with get_fp8_context(core.config, 0):
                module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))
        for direction in ("scaling_fwd", "scaling_bwd"):
            for what in ("scale", "amax_history"):
                found[f"{name} {direction} {what}"] = getattr(module.fp8_meta[direction], what)
    return found


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_scales_of_delayed_fp8_come_back(engine_world: World, family: str, tmp_path: Path) -> None:
    """They are a pickle, which Transformer Engine since 2.20 refuses to read by itself."""
    build_folder(family, tmp_path / "model")
    before, after = engine_world.call(scales_after_resuming, tmp_path / "model", str(tmp_path / "checkpoint"), size=1)[0]
    assert len(before) == 4 * 4 * 4  # layers, modules in FP8, tensors
    assert_equal(after, before)


# --- the platform -----------------------------------------------------------------------------------------------------


def test_it_is_found_by_a_process_that_has_not_imported_torch(engine_world: World) -> None:
    """A driver chooses the layer spec of its ranks before it needs torch itself."""
    program = "from megarl.megatron.options import has_transformer_engine; print(has_transformer_engine())"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.split() == ["True"], ran.stderr


def trained_on_a_cpu(rank: int, world_size: int, folder: Path) -> tuple[str, str, bool]:
    from megarl.megatron.optimizer import describe_optimizer
    from megarl.megatron.options import choose_layer_spec
    from tests.megatron.moments import role_in, update

    role = role_in(Layout(), folder)
    before = {name: tensor.clone() for name, tensor in role.export()}
    update(role, rank)
    moved = any(not torch.equal(before[name], tensor) for name, tensor in role.export())
    return describe_optimizer(ADAM), choose_layer_spec("auto", "cpu"), moved


def test_a_cpu_trains_as_if_transformer_engine_were_not_installed(engine_world: World, world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    assert world.call(trained_on_a_cpu, tmp_path / "model", size=1)[0] == ("torch.optim.adamw.AdamW", REFERENCE, True)
