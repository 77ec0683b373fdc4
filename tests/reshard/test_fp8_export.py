"""On real ranks, an export in FP8 is what quantising the exported whole tensors gives, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.layout import Layout
from tests.families import build_folder
from tests.world import World


def differences(rank: int, world_size: int, folder: str, layout: Layout) -> tuple[list[str], int]:
    """On a leading rank: the tensors that are not what they must be, and how many are in FP8."""
    from megarl.checkpoint.fp8 import SCALE_SUFFIX, quantise_rows
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.roles import Role
    from megarl.reshard.quantise import Fp8Quantiser

    initialize_layout(layout, seed=1)
    role = Role(ModelOptions(folder, layout, dtype="bfloat16"))
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in role.export():
        is_linear = (tensor.ndim == 2 and "_proj" in name) or ".experts." in name
        expected[name] = tensor.clone()
        if is_linear:
            expected[name], expected[name + SCALE_SUFFIX] = quantise_rows(tensor)
    found = {name: tensor.clone() for name, tensor in role.export(Fp8Quantiser())}
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
