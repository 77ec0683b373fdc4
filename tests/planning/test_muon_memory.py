"""What a plan counts for Muon: one moment for each element of the matrices that it updates, as its optimizer has it."""

from __future__ import annotations

from math import prod
from pathlib import Path

from megarl.config.layout import Layout
from megarl.models.shape import ModelShape
from megarl.planning.parameters import stage_parameters
from tests.families import build_folder


def test_matrices_of_layers_are_counted_by_rank(tmp_path: Path) -> None:
    build_folder("mixtral", tmp_path / "model")
    shape = ModelShape.read(tmp_path / "model")
    sizes = {name: size for name, size in shape.weight_map.hf_shapes().items() if ".layers." in name and len(size) == 2}
    dense = sum(prod(size) for name, size in sizes.items() if ".experts." not in name)
    expert = sum(prod(size) for name, size in sizes.items() if ".experts." in name)
    (alone,) = stage_parameters(shape, Layout())
    assert (alone.dense_matrices, alone.expert_matrices) == (dense, expert)
    (spread,) = stage_parameters(shape, Layout(dp=2, ep=2), freeze=("router",))
    routers = sum(prod(size) for name, size in sizes.items() if ".gate." in name)
    assert (spread.dense_matrices, spread.expert_matrices) == (dense - routers, expert // 2)
