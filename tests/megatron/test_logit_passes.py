"""The passes over a chunk of logits against float64: in blocks of rows, and as the Triton kernels that GPUs run.

The kernels run in Triton's interpreter, where Triton is installed; they need no GPU then.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megarl.megatron import logit_passes
from megarl.megatron.logit_passes import logits_to_gradient, row_sums
from megarl.megatron.row_gradients import RowGradients
from megarl.megatron.slice_sums import relative_to_all

ROWS, WIDTH, REAL = 7, 61, 53
KERNEL_TESTS = 13


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads it when it is imported, so that a process interprets all kernels or none."""


@pytest.fixture(params=["blocks", "kernels"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Blocks of two rows, or in their place kernels, whose tiles do not divide a row."""
    monkeypatch.setitem(logit_passes.BLOCK_BYTES, "cpu", 4 * 2 * REAL)
    if request.param == "kernels":
        if not INTERPRETED:
            pytest.skip("runs in the process of test_the_kernels_are_right_in_tritons_interpreter")
        from megarl.megatron import logit_kernels

        monkeypatch.setattr(logit_kernels, "TILE", 16)
        monkeypatch.setattr(logit_passes, "row_sums", logit_kernels.row_sums_by_kernel)
        monkeypatch.setattr(logit_passes, "logits_to_gradient", logit_kernels.gradient_by_kernel)
    return str(request.param)


@pytest.mark.skipif(INTERPRETED, reason="is this process")
def test_the_kernels_are_right_in_tritons_interpreter() -> None:
    """The tests of this file that take `kernels`, in a process that interprets them."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "kernels", __file__]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert f"{KERNEL_TESTS} passed" in ran.stdout, ran.stdout[-4000:]


def logits_of(dtype: torch.dtype) -> Tensor:
    """Some of them large; what stands in the padding must not matter."""
    logits = 4 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    logits[1] += 300
    logits[2] -= 300
    logits[3, 17] = 80
    logits[:, REAL:] = torch.nan
    return logits.to(dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_rows_are_those_of_float64(how: str, dtype: torch.dtype, temperature: float) -> None:
    logits = logits_of(dtype)
    found = logit_passes.row_sums(logits, REAL, temperature, squares=True)
    x = logits[:, :REAL].double() / temperature
    below = x - x.amax(1, keepdim=True)
    expected = torch.stack(
        [x.amax(1), below.exp().sum(1), (below.exp() * below).sum(1), (2 * below).exp().sum(1)],
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(logit_passes.row_sums(logits, REAL, temperature, squares=False), found[:3])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_logits_are_those_of_float64(how: str, dtype: torch.dtype, targets: int, temperature: float) -> None:
    """Of log-probs of several targets, two of them the same, and of entropies; targets in other slices count for nothing."""
    logits, generator = logits_of(dtype), torch.Generator().manual_seed(1)
    target = torch.randint(0, REAL, (ROWS, targets), generator=generator)
    target[:, -1] = target[:, 0]
    of_log_probs, of_entropy = torch.randn(ROWS, targets, generator=generator), torch.randn(ROWS, generator=generator)
    exact = logits[:, :REAL].double().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((log_p.gather(1, target) * of_log_probs).sum() + (entropy * of_entropy).sum()).backward()
    assert exact.grad is not None
    log_z = (exact.detach() / temperature).logsumexp(-1).float()
    here = torch.ones_like(target, dtype=torch.bool)
    given = RowGradients(log_z, entropy.detach().float(), of_entropy, of_log_probs, target, here)
    chunk = logits.clone()
    found = logit_passes.logits_to_gradient(chunk, REAL, temperature, given)
    assert found.data_ptr() == chunk.data_ptr()
    rtol, atol = (2**-7, 1e-4) if dtype == torch.bfloat16 else (1e-4, 1e-4)  # log Z of 300 has four digits behind the point
    torch.testing.assert_close(found[:, :REAL].double(), exact.grad, rtol=rtol, atol=atol)
    assert torch.equal(found[:, REAL:], torch.zeros_like(found[:, REAL:]))
    elsewhere = given._replace(here=~here)
    without = logit_passes.logits_to_gradient(logits.clone(), REAL, temperature, elsewhere)
    at_target = torch.zeros(ROWS, WIDTH).scatter_add_(1, target, of_log_probs) / temperature
    torch.testing.assert_close(without.float() + at_target, found.float(), rtol=2 * rtol, atol=2 * atol)


def test_a_slice_of_padding_alone_has_no_share(how: str) -> None:
    logits = torch.full((2, 5), torch.nan)
    found = logit_passes.row_sums(logits, 0, 1.0, squares=True)
    assert found.tolist() == [[-torch.inf] * 2] + [[0.0] * 2] * 3
    one, none = torch.ones(2), torch.zeros(2, 1, dtype=torch.long)
    given = RowGradients(one, one, one, one[:, None], none, none.bool())
    assert not logit_passes.logits_to_gradient(logits, 0, 1.0, given).any()


class TwoRanks:
    """A group of two, as far as the largest logit asks."""

    def size(self) -> int:
        return 2


def test_the_sums_of_slices_add_up_to_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third slice is padding."""
    logits = logits_of(torch.float32)[:, :REAL]
    whole = row_sums(logits, REAL, 1.0, squares=True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda peak, *of, **group: peak.copy_(whole[0]))
    slices = (logits[:, :20], 20), (logits[:, 20:], REAL - 20), (torch.zeros(ROWS, 4), 0)
    parts = [relative_to_all(row_sums(part, real, 1.0, squares=True), TwoRanks()) for part, real in slices]  # type: ignore[arg-type]
    added = [sum(part[number] for part in parts) for number in (1, 2, 3)]
    torch.testing.assert_close(torch.stack(added), whole[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="compiles nothing")
def test_kernel_code_is_made_for_gpus() -> None:
    """Machine code of an A100 and an H100, by the compiler that comes with Triton; nothing runs."""
    triton = pytest.importorskip("triton")
    from megarl.megatron import logit_kernels as kernels

    numbers = {"row_stride": "i32", "real": "i32", "rows": "i32", "temperature": "fp32", "width": "i32", "count": "i32"}
    floats = {"found": "*fp32", "per_row": "*fp32", "at_targets": "*fp32", "targets": "*i64"}
    for kernel in (kernels.row_sums_kernel, kernels.gradient_kernel):
        for logits in ("*bf16", "*fp32"):
            types = {**numbers, **floats, "logits": logits}
            constants = {"TILE": kernels.TILE, "SQUARES": True}
            names = kernel.arg_names
            source = triton.compiler.ASTSource(
                fn=kernel,
                signature={name: types.get(name, "constexpr") for name in names},
                constexprs={name: value for name, value in constants.items() if name in names},
            )
            for architecture in (80, 90):
                target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
                compiled = triton.compile(source, target=target, options={"num_warps": kernels.WARPS})
                assert compiled.asm["cubin"]
                assert compiled.metadata.shared <= 48 * 1024


def test_passes_over_blocks_do_not_depend_on_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(torch.float32)
    found = []
    for rows in (1, 3, ROWS):
        monkeypatch.setitem(logit_passes.BLOCK_BYTES, "cpu", 4 * rows * REAL)
        sums = row_sums(logits, REAL, 0.7)
        target = torch.zeros(ROWS, 1, dtype=torch.long)
        given = RowGradients(sums[0] + sums[1].log(), sums[2], sums[1], sums[:1].t(), target, target == 0)
        found.append((sums, logits_to_gradient(logits.clone(), REAL, 0.7, given)))
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more, strict=True))
