"""Without a GPU, a rank that is told it has one builds a model, scores, is updated, gives up its memory and sends its weights.

Nothing is on the wrong device or of the wrong type, no operator gets tensors that CUDA would refuse, and the values are those
of a rank on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import build_folder
from tests.megatron.whole_rank import CHOICES, KINDS_OF_FAMILIES, worked
from tests.predicting import build_predicting
from tests.world import World, WorldFailure

pytestmark = pytest.mark.slow
REPRESENTATIVE = {
    ("llama", "bfloat16"), ("qwen3", "adapters"), ("mixtral", "recorded"), ("deepseek_v3", "prediction"),
}  # fmt: skip
COME_WITH = {"qwen3_5": "linear_attention", "granite_hybrid": "state_spaces"}
NEAR = {"float32": (1e-4, 2e-4), "bfloat16": (2e-2, 6e-2)}
"""How near values are to those of a CPU, relatively and absolutely: products of bfloat16 are summed in other places there."""


@pytest.fixture(scope="module")
def gpu_world() -> Iterator[World]:
    """One process that is told that it has a GPU."""
    with World(1, first="tests.pretended_gpu") as own:
        yield own


def cells() -> Iterator[Any]:
    """Each family under each set of options that is for its kind."""
    for family, kinds in KINDS_OF_FAMILIES.items():
        for name, choice in CHOICES.items():
            if choice.kind in (None, *kinds):
                is_kept = (family, name) in REPRESENTATIVE
                needed = {COME_WITH.get(family), choice.option} - {None}
                marks = [pytest.mark.needs_option(*needed)] if needed else []
                yield pytest.param(family, name, marks=marks if is_kept else [*marks, pytest.mark.exhaustive])


@pytest.mark.parametrize(("family", "name"), cells())
def test_a_rank_on_a_pretended_gpu_does_what_one_on_a_cpu_does(
    world: World, gpu_world: World, tmp_path: Path, family: str, name: str
) -> None:
    write = build_predicting if CHOICES[name].kind == "predicting" else build_folder
    write(family, tmp_path)
    dtype = CHOICES[name].model.get("dtype", "float32")
    rtol, atol = NEAR[dtype]
    expected = world.call(worked, tmp_path, name, size=1, timeout_s=400)[0]
    routers = expected["routers"] if dtype == "bfloat16" else None
    found = gpu_world.call(worked, tmp_path, name, routers, timeout_s=400)[0]
    assert len(found["routers"]) == len(expected["routers"])
    for own, theirs in zip(found["routers"], expected["routers"], strict=True):
        assert float((own - theirs).norm()) <= rtol * float(theirs.norm()), float((own - theirs).norm() / theirs.norm())
    for what in ("scores", "weights", "metrics"):
        assert found[what].keys() == expected[what].keys()
        for key, values in expected[what].items():
            torch.testing.assert_close(found[what][key], values, rtol=rtol, atol=atol, msg=partial("{}: {}".format, key))


def spoiled(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """As `worked`, with a loss that multiplies by a tensor in main memory."""
    from tests.megatron import whole_rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_rank, "objective", lambda output, stream: ((output * torch.ones(len(output), 1)).sum(), {}))
        return worked(rank, world_size, folder, "float32")


def test_what_cuda_would_refuse_is_refused_and_named(gpu_world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path)
    sentence = (
        r"Expected all tensors to be on the same device: aten.mul.Tensor of torch.float32 .* on cuda:0, torch.float32 .* on cpu"
    )
    with pytest.raises(WorldFailure, match=sentence):
        gpu_world.call(spoiled, tmp_path, timeout_s=400)


def stood_for(rank: int, world_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By operator that torch has on GPUs alone, what stands for it gives, and what torch gives otherwise in float64."""
    from tests.pretended_gpu import GPU, the_gpu

    generator = torch.Generator().manual_seed(1)
    values, weight, gradient = (torch.randn(shape, generator=generator) for shape in ((5, 3, 8), (8,), (5, 3, 8)))
    left, right, total = (torch.randn(shape, generator=generator) for shape in ((4, 6), (6, 3), (4, 3)))
    exact = [tensor.double().requires_grad_() for tensor in (values, weight)]
    torch.nn.functional.rms_norm(exact[0], (8,), exact[1], 1e-5).backward(gradient.double())
    with the_gpu():
        inverse = (values.square().mean(-1, keepdim=True) + 1e-5).rsqrt().to(GPU)
        given = (gradient.to(GPU), values.to(GPU), [8], inverse, weight.to(GPU), [True, True])
        of_values, of_weight = torch.ops.aten._fused_rms_norm_backward(*given)
        sum_ = total.to(GPU)
        torch.addmm(sum_, left.bfloat16().to(GPU), right.bfloat16().to(GPU), out_dtype=torch.float32, out=sum_)
        product = total.double() + left.bfloat16().double() @ right.bfloat16().double()
        return {
            "values": (of_values.cpu(), exact[0].grad),
            "weight": (of_weight.cpu(), exact[1].grad),
            "product": (sum_.cpu(), product),
        }


def test_what_stands_for_operators_of_gpus_alone_is_exact(gpu_world: World) -> None:
    for name, (found, expected) in gpu_world.call(stood_for)[0].items():
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, msg=partial("{}: {}".format, name))
