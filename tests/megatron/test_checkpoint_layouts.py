"""A checkpoint written under one layout and read under another: the same parameters and Adam moments, bit for bit, and the
same next update; schedule and step go along, and random numbers do as far as there are ranks to have them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megarl.config.layout import Layout
from megarl.models.adapters import AdapterSpec
from tests.algorithms.test_memory import peak_bytes, size
from tests.families import build_folder
from tests.megatron.moments import MOMENTS, adams, assert_equal, everything, merged, role_in, trained, update
from tests.megatron.saving import copied, load_role, save_role, write_parts
from tests.world import World

UPDATES = 2


@dataclass(frozen=True)
class Move:
    """From one layout to another."""

    family: str
    source: Layout
    target: Layout
    dtype: str = "float32"
    lora: AdapterSpec | None = None


MOVES = {
    "tp2 to pp2": Move("llama", Layout(tp=2), Layout(pp=2)),
    "dp2 to tp2+sp": Move("qwen2", Layout(dp=2), Layout(tp=2, sequence_parallel=True)),
    "dp2 to tp2+sp, bfloat16": Move("llama", Layout(dp=2), Layout(tp=2, sequence_parallel=True), "bfloat16"),
    "vpp2 to dp2": Move("llama", Layout(pp=2, vpp=2), Layout(dp=2)),
    "tied embeddings, pp2 to tp2": Move("llama-tied", Layout(pp=2), Layout(tp=2)),
    "tied embeddings, tp2 to pp2 uneven": Move("qwen3-tied", Layout(tp=2), Layout(pp=2, first_stage_layers=1)),
    "cp2 to tp2": Move("llama", Layout(cp=2), Layout(tp=2)),
    "ep2 to etp2": Move("mixtral", Layout(dp=2, ep=2), Layout(tp=2, etp=2, sequence_parallel=True)),
    "ep2·tp2+sp to pp2": Move("qwen3_moe", Layout(tp=2, dp=2, ep=2, sequence_parallel=True), Layout(pp=2)),
    "pp2·ep2 to ep2": Move("deepseek_v3", Layout(pp=2, dp=2, ep=2), Layout(dp=2, ep=2)),
}


def draws() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        parallel = torch.rand(4).tolist()
    return {
        "python": random.random(),
        "numpy": numpy.random.rand(4).tolist(),
        "torch": torch.rand(4).tolist(),
        "parallel": parallel,
    }


def answer_of(role: Any, rank: int) -> dict[str, Any]:
    drawn, tensors = draws(), everything(role)
    steps = {int(state["step"]) for adam in adams(role) for state in adam.optimizer.state.values()}
    lr = role.optimizer.param_groups[0]["lr"]
    update(role, rank)
    after = trained(role)
    return {"tensors": tensors, "steps": steps, "lr": lr, "draws": drawn, "after": after}


def save(rank: int, world_size: int, move: Move, folder: Path, checkpoint: str, updates: int) -> dict[str, Any]:
    from megarl.megatron.role_checkpoint import shards_of_role

    role = role_in(move.source, folder, move.dtype, lora=move.lora)
    for _ in range(updates):
        update(role, rank)
    draws()
    shards = copied(shards_of_role(role))
    answer = answer_of(role, rank)  # it trains on, which what is being saved does not see
    write_parts(shards, checkpoint)
    return answer


def load(rank: int, world_size: int, layout: Layout, move: Move, folder: Path, checkpoint: str) -> dict[str, Any]:

    role = role_in(layout, folder, move.dtype, lora=move.lora)
    load_role(role, checkpoint)
    return answer_of(role, rank)


IN_OTHERS = ("dp2 to tp2+sp", "tied embeddings, pp2 to tp2", "pp2·ep2 to ep2")
"""The same in bfloat16, the other way round, and ep2·tp2+sp to pp2 stand for them."""


@pytest.mark.parametrize(
    "move", [pytest.param(m, id=n, marks=pytest.mark.exhaustive if n in IN_OTHERS else ()) for n, m in MOVES.items()]
)
def test_another_layout_gives_the_same_parameters_moments_and_next_update(world: World, move: Move, tmp_path: Path) -> None:
    assert_moves(world, move, tmp_path)


def assert_moves(world: World, move: Move, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "model", str(tmp_path / "checkpoint")
    build_folder(move.family, folder)
    saved = world.call(save, move, folder, checkpoint, UPDATES, size=move.source.world_size)
    loaded = world.call(load, move.target, move, folder, checkpoint, size=move.target.world_size)
    tensors = merged(saved, "tensors")
    assert len(tensors) % (1 + len(MOMENTS)) == 0
    assert all(float(tensor.abs().sum()) > 0 for name, tensor in tensors.items() if name.startswith("exp_avg_sq"))
    assert_equal(merged(loaded, "tensors"), tensors)
    assert {step for answer in (*saved, *loaded) for step in answer["steps"]} == {UPDATES}
    assert len({answer["lr"] for answer in (*saved, *loaded)}) == 1
    expected = merged(saved, "after")
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if move.dtype == "float32" else {"rtol": 2e-2, "atol": 2e-3}
    for name, tensor in merged(loaded, "after").items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_the_same_layout_gives_every_rank_its_random_numbers_back(world: World, tmp_path: Path) -> None:
    move = Move("llama", Layout(tp=2), Layout(tp=2))
    build_folder(move.family, tmp_path / "model")
    saved = world.call(save, move, tmp_path / "model", str(tmp_path / "a"), 1, size=2)
    loaded = world.call(load, move.target, move, tmp_path / "model", str(tmp_path / "a"), size=2)
    assert [answer["draws"] for answer in loaded] == [answer["draws"] for answer in saved]
    assert saved[0]["draws"]["parallel"] != saved[1]["draws"]["parallel"]
    assert_equal(merged(loaded, "after"), merged(saved, "after"))


def test_another_layout_draws_what_seed_and_updates_determine(world: World, tmp_path: Path) -> None:
    move = Move("llama", Layout(tp=2), Layout(dp=2))
    build_folder(move.family, tmp_path / "model")
    for updates in (1, 2):
        world.call(save, move, tmp_path / "model", str(tmp_path / f"{updates}"), updates, size=2)
    first, again, other = (
        world.call(load, move.target, move, tmp_path / "model", str(tmp_path / name), size=2) for name in ("2", "2", "1")
    )
    assert [answer["draws"] for answer in first] == [answer["draws"] for answer in again]
    assert first[0]["draws"] == first[1]["draws"]  # data-parallel replicas of one tensor rank
    for generator, drawn in other[0]["draws"].items():
        assert drawn != first[0]["draws"][generator]


def test_a_checkpoint_before_the_first_update_has_moments_of_zero(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_folder("llama", folder)
    world.call(save_untrained, folder, str(tmp_path / "checkpoint"), size=1)
    loaded = world.call(load, Layout(tp=2), Move("llama", Layout(), Layout()), folder, str(tmp_path / "checkpoint"), size=2)
    assert {step for answer in loaded for step in answer["steps"]} == {0}
    tensors = merged(loaded, "tensors")
    for name, tensor in tensors.items():
        moment, _, parameter = name.partition(" ")
        expected = tensors[f"weight {parameter}"] if moment in ("weight", "param") else torch.zeros_like(tensor)
        assert torch.equal(tensor, expected), name


def save_untrained(rank: int, world_size: int, folder: Path, checkpoint: str) -> None:
    save_role(role_in(Layout(), folder, "float32"), checkpoint)


def resume(rank: int, world_size: int, move: Move, folder: Path, checkpoint: str) -> dict[str, int]:
    """Bytes: the most that loading allocates at once, Adam's moments, a bucket of weights, the largest tensor in float32."""

    role = role_in(move.target, folder, move.dtype)
    peak = peak_bytes(lambda: load_role(role, checkpoint))
    moments = [
        tensor
        for adam in adams(role)
        for state in adam.optimizer.state.values()
        for name, tensor in state.items()
        if name.startswith("exp_avg")
    ]
    parameters = [parameter for chunk in role.chunks for parameter in chunk.parameters()]
    return {
        "peak": peak,
        "moments": size(*moments),
        "largest": 4 * max(parameter.numel() for parameter in parameters),
        "bucket": size(*parameters),  # without overlap all weights are one, which Gloo gathers in a copy
        "all": 4 * sum(parameter.numel() for parameter in parameters),
    }


@pytest.mark.parametrize(
    "move",
    [Move("llama", Layout(dp=2), Layout(dp=2), "bfloat16"), Move("llama", Layout(tp=2), Layout(dp=2))],
    ids=["bfloat16", "tp2 to dp2"],
)
def test_resuming_holds_what_the_rank_owns_and_one_bucket(world: World, move: Move, tmp_path: Path) -> None:
    """Not every parameter's moments and weights at once, which a GPU that trains has no room for."""
    folder, checkpoint = tmp_path / "model", str(tmp_path / "checkpoint")
    build_folder("llama", folder)
    world.call(save, move, folder, checkpoint, 1, size=2)
    for answer in world.call(resume, move, folder, checkpoint, size=2):
        assert answer["moments"] == pytest.approx(answer["all"], rel=0.1)  # two of them, over two ranks
        assert answer["peak"] <= answer["moments"] + answer["bucket"] + 2 * answer["largest"]
