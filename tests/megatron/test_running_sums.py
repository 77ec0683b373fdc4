"""Nothing that a deterministic run computes on a GPU is a running sum of floats by torch's `cumsum`, which raises there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.megatron.kept_tokens import least_kept
from megarl.megatron.options import SamplingLimits
from megarl.megatron.running_sums import BLOCK, running_sum
from megarl.options.linear_attention.delta_rule import gated_delta_rule
from megarl.options.state_spaces.scan import chunked_scan

RAISING = {"aten::cumsum", "aten::cumprod", "aten::grid_sampler_2d_backward", "aten::put_", "aten::histc", "aten::median.dim"}
"""Operations that raise on CUDA under deterministic algorithms, of floats (torch.use_deterministic_algorithms lists them)."""


class AsOnCuda(TorchDispatchMode):
    """Raise where CUDA would."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in RAISING and args[0].is_floating_point():
            raise RuntimeError(f"{function} does not have a deterministic implementation")
        return function(*args, **kwargs or {})


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    with AsOnCuda():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("length", [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_sums_are_those_of_exact_addition(length: int, dtype: torch.dtype, deterministic: None) -> None:
    values = torch.rand(3, length, dtype=dtype)
    exact = torch.stack([values[:, : end + 1].double().sum(1) for end in range(length)], dim=1)
    torch.testing.assert_close(running_sum(values).double(), exact, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_delta_rule_has_the_same_values_and_gradients(by_channel: bool, request: pytest.FixtureRequest) -> None:
    def computed() -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, 100, 2, 8, generator=generator) for _ in range(3))
        decay = -torch.rand(1, 100, 2, *([8] if by_channel else []), generator=generator)
        inputs = [q, torch.nn.functional.normalize(k, dim=-1), v, decay, torch.rand(1, 100, 2, generator=generator)]
        leaves = [tensor.requires_grad_() for tensor in inputs]
        read, state = gated_delta_rule(*leaves, torch.zeros(1, 2, 8, 8))
        (read.square().sum() + state.sum()).backward()
        return [read.detach(), state.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = computed()
    request.getfixturevalue("deterministic")
    torch.testing.assert_close(computed(), expected, rtol=1e-5, atol=1e-5)


def test_the_scan_of_state_spaces_has_the_same_values(request: pytest.FixtureRequest) -> None:
    generator = torch.Generator().manual_seed(2)
    x, steps = torch.randn(1, 90, 4, 8, generator=generator), torch.rand(1, 90, 4, generator=generator)
    b, c = (torch.randn(1, 90, 2, 6, generator=generator) for _ in range(2))
    arguments = (x, steps, -torch.rand(4, generator=generator), b, c, torch.zeros(1, 4, 8, 6))
    expected = chunked_scan(*arguments)
    request.getfixturevalue("deterministic")
    torch.testing.assert_close(chunked_scan(*arguments), expected, rtol=1e-5, atol=1e-5)


def test_top_p_keeps_the_same_tokens(request: pytest.FixtureRequest) -> None:
    class Alone:
        def size(self) -> int:
            """One rank."""
            return 1

        def rank(self) -> int:
            """The first."""
            return 0

    logits = torch.randn(5, 2000, generator=torch.Generator().manual_seed(3)) * 3
    arguments: Any = (logits, logits.amax(1, keepdim=True), SamplingLimits(top_p=0.9), Alone())
    expected = least_kept(*arguments)
    request.getfixturevalue("deterministic")
    assert torch.equal(least_kept(*arguments), expected)
