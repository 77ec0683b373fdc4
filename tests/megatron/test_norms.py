"""RMSNorm on a CPU is torch's, values and gradients, with fewer passes over memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.megatron.norms import rms_norm

EPS = 1e-5


def given(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight, and what is asked of the output."""
    generator = torch.Generator().manual_seed(0)
    hidden, asked = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(shape[-1], generator=generator)).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), asked


@pytest.mark.parametrize("shape", [(5, 1, 64), (3, 2, 4, 8), (1, 1, 7)])
def test_float32_is_as_near_to_float64_as_torchs(shape: tuple[int, ...]) -> None:
    hidden, weight, asked = given(torch.float32, *shape)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact_output = functional.rms_norm(exact[0], shape[-1:], exact[1], EPS)
    exact_results = [exact_output.detach(), *torch.autograd.grad(exact_output, exact, asked.double())]

    def error(output: torch.Tensor) -> float:
        results = [output.detach(), *torch.autograd.grad(output, (hidden, weight), asked)]
        pairs = zip(results, exact_results, strict=True)
        return max(float((result - expected).abs().max() / expected.abs().max()) for result, expected in pairs)

    ours, torchs = error(rms_norm(hidden, weight, EPS)), error(functional.rms_norm(hidden, shape[-1:], weight, EPS))
    assert ours <= max(torchs, 3 * torch.finfo(torch.float32).eps)


def test_gradients_in_float64() -> None:
    hidden, weight, _ = given(torch.float64, 3, 2, 6)
    assert torch.autograd.gradcheck(lambda *tensors: rms_norm(*tensors, EPS), (hidden, weight))


class Calls(TorchDispatchMode):
    """How many operations compute something."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func not in (torch.ops.aten.view.default, torch.ops.aten.detach.default)
        return func(*args, **(kwargs or {}))


def operations(norm: Any) -> int:
    hidden, weight, asked = given(torch.float32, 5, 1, 64)
    with Calls() as calls:
        norm(hidden, weight, EPS).backward(asked)
    return calls.number


def test_it_takes_fewer_operations_than_torch() -> None:
    torchs = operations(lambda hidden, weight, eps: functional.rms_norm(hidden, weight.shape, weight, eps))
    assert operations(rms_norm) < 0.7 * torchs


def test_bfloat16_is_what_torch_makes_of_it() -> None:
    hidden, weight, asked = given(torch.bfloat16, 50, 1, 64)
    outputs = rms_norm(hidden, weight, EPS), functional.rms_norm(hidden, (64,), weight, EPS)
    ours, torchs = ([output, *torch.autograd.grad(output, (hidden, weight), asked)] for output in outputs)
    for one, other in zip(ours, torchs, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)  # one unit in the last place
