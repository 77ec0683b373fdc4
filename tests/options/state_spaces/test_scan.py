"""The scan in chunks, and the order of a packed stream, against the recurrence written out in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.data.stream import Response, Unit, pack, split_shared_prompts
from megarl.options.state_spaces.layer import Convolution, Mamba2
from megarl.options.state_spaces.scan import chunked_scan
from megarl.options.state_spaces.scan_order import scan_order

HEADS, WIDTH, GROUPS, STATE = 6, 4, 2, 5


def tokens(*lead: int, step: float = 1.0) -> list[Tensor]:
    """x, d, a, B and C `[*lead, ...]` in float64, as a layer computes them."""
    generator = torch.Generator().manual_seed(sum(lead))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rates, groups = -normal(HEADS).exp(), (*lead, GROUPS, STATE)
    return [normal(*lead, HEADS, WIDTH), step * normal(*lead, HEADS).exp(), rates, normal(*groups), normal(*groups)]


def one_by_one(x: Tensor, d: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, for one sequence `[T, heads, ...]`: what each token reads, and the state behind the last."""
    reads, of_group = [], HEADS // GROUPS
    for token, step, write, read in zip(x, d, b.repeat_interleave(of_group, 1), c.repeat_interleave(of_group, 1), strict=True):
        state = state * (step * a).exp()[:, None, None] + torch.einsum("h,hp,hn->hpn", step, token, write)
        reads.append(torch.einsum("hpn,hn->hp", state, read))
    return torch.stack(reads), state


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (7, 64), (7, 1), (8, 4), (13, 4), (150, 64)])
def test_chunks_give_the_reads_states_and_gradients_of_the_recurrence(length: int, chunk: int) -> None:
    inputs = [*tokens(2, length), torch.randn(2, HEADS, WIDTH, STATE, dtype=torch.float64)]
    weights = torch.randn(2, length, HEADS, WIDTH).double(), torch.randn(2, HEADS, WIDTH, STATE).double()

    def gradients(reads: Tensor, state: Tensor, of: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad((weights[0] * reads).sum() + (weights[1] * state).sum(), of))

    ours = [t.clone().requires_grad_() for t in inputs]
    found = chunked_scan(*ours, chunk=chunk)
    theirs = [t.clone().requires_grad_() for t in inputs]
    rows = [one_by_one(*(t if t is theirs[2] else t[row] for t in theirs)) for row in range(2)]
    expected = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    for one, other in zip(gradients(*found, ours), gradients(*expected, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("step", [1e-3, 1.0, 40.0])
def test_float32_is_exact_whether_states_are_kept_or_forgotten(step: float) -> None:
    exact = [*tokens(1, 300, step=step), torch.zeros(1, HEADS, WIDTH, STATE, dtype=torch.float64)]
    inputs = [t.float().requires_grad_() for t in exact]
    found, state = chunked_scan(*inputs)
    expected, expected_state = one_by_one(*(t if t is exact[2] else t[0] for t in exact))
    for one, other in ((found[0], expected), (state[0], expected_state)):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-6 * float(expected.abs().max()))
    (found.sum() + state.sum()).backward()
    assert all(bool(t.grad.isfinite().all()) for t in inputs if t.grad is not None)


def units() -> list[Unit]:
    """Prompts shorter and longer than a convolution, with one response, three and single-token ones."""
    generator = torch.Generator().manual_seed(11)

    def ids(length: int) -> Tensor:
        return torch.randint(0, 50, (length,), generator=generator)

    found, index = [], 0
    for prompt, lengths in ((1, (9, 2, 30)), (2, (5, 4)), (17, (12,)), (40, (1, 3, 80))):
        responses = []
        for length in lengths:
            responses.append(Response(index, ids(length), torch.ones(length, dtype=torch.bool)))
            index += 1
        found.append(Unit(ids(prompt), responses))
    return found


def layer_of(rates: Tensor) -> Any:
    """What `Mamba2._read` needs of a layer."""
    sizes = SimpleNamespace(head_dim=WIDTH, state=STATE)
    own = {"A_log": (-rates).log(), "D": torch.linspace(-1, 1, HEADS, dtype=torch.float64)}
    found = SimpleNamespace(own_heads=HEADS, own_inner=HEADS * WIDTH, sizes=sizes, _own=lambda parameter: parameter, **own)
    found._run = lambda *arguments: Mamba2._run(found, *arguments)
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_every_response_reads_what_it_would_behind_its_prompt_alone(shared: bool) -> None:
    stream = pack(units() if shared else split_shared_prompts(units()), pad_to_multiple=8)
    order = scan_order(stream, 4)
    assert len(order.stages) == (2 if shared else 1)
    x, d, rates, b, c = tokens(50)
    of_id = torch.cat([x.flatten(1), b.flatten(1), c.flatten(1), d], dim=1).requires_grad_()
    layer = layer_of(rates)
    of_rows = Mamba2._read(layer, order, of_id[stream.token_ids])[stream.rows]
    expected = []
    for unit in units():
        for response in unit.responses:
            ids = torch.cat([unit.prompt_ids, response.token_ids])
            parts = of_id[ids].split([HEADS * WIDTH, GROUPS * STATE, GROUPS * STATE, HEADS], dim=1)
            inputs, writes, reads = parts[0].unflatten(1, (HEADS, -1)), *(t.unflatten(1, (GROUPS, -1)) for t in parts[1:3])
            found, _ = one_by_one(inputs, parts[3], rates, writes, reads, torch.zeros(HEADS, WIDTH, STATE).double())
            expected.append((found + inputs * layer.D[:, None])[len(unit.prompt_ids) - 1 : -1])
    wanted = torch.cat(expected)
    torch.testing.assert_close(of_rows, wanted, rtol=1e-10, atol=1e-10)
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    [ours] = torch.autograd.grad((weights * of_rows).sum(), [of_id], retain_graph=True)
    [theirs] = torch.autograd.grad((weights * wanted).sum(), [of_id])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_the_convolution_sees_the_prompt_and_no_other_sequence(shared: bool, width: int) -> None:
    stream = pack(units() if shared else split_shared_prompts(units()), pad_to_multiple=8)
    layer = Convolution(6, width, has_bias=True, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    of_id = torch.randn(50, 6, dtype=torch.float64)
    found = layer(of_id[stream.token_ids], scan_order(stream, width), lambda parameter: parameter)[stream.rows]
    expected = []
    for unit in units():
        for response in unit.responses:
            ids = torch.cat([unit.prompt_ids, response.token_ids])
            padded = torch.nn.functional.pad(of_id[ids].T, (width - 1, 0))
            whole = torch.nn.functional.conv1d(padded, layer.weight, layer.bias, groups=6)
            expected.append(torch.nn.functional.silu(whole.T)[len(unit.prompt_ids) - 1 : -1])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-12, atol=1e-13)
