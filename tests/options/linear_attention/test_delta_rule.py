"""The gated delta rule in chunks, and the order of a packed stream, against the recurrence written out in float64."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.data.recurrence import recurrence_of
from megarl.data.stream import Response, Unit, pack, split_shared_prompts
from megarl.errors import ModelError
from megarl.options.linear_attention.delta_rule import gated_delta_rule, unit_length
from megarl.options.linear_attention.layer import CausalConvolution, StateRule, fla_rule, plain_rule

HEADS, KEY, VALUE = 3, 5, 4


def tokens(
    *lead: int, dtype: torch.dtype = torch.float64, decay: float = 1.0, by_channel: bool = False, most: float = 1.0
) -> list[Tensor]:
    """Query, key, value, log decay and strength `[*lead, heads, ...]`, as a layer computes them; `most` is written."""
    generator = torch.Generator().manual_seed(sum(lead))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, HEADS, *shape, generator=generator, dtype=torch.float64)

    found = [unit_length(normal(KEY)), unit_length(normal(KEY)), normal(VALUE)]
    found += [-decay * normal(*[KEY] if by_channel else []).exp(), most * normal().sigmoid()]
    return [t.to(dtype) for t in found]


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, for one sequence `[T, heads, ...]`: what each token reads, and the state behind the last."""
    reads = []
    for q, k, v, g, b in zip(query, key, value, decay, strength, strict=True):
        state = state * (g[:, :, None] if g.dim() == 2 else g[:, None, None]).exp()
        error = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv,h->hkv", k, error, b)
        reads.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(reads), state


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (7, 64), (7, 1), (8, 4), (13, 4), (150, 64)])
def test_chunks_give_the_reads_states_and_gradients_of_the_recurrence(length: int, chunk: int, by_channel: bool) -> None:
    of_tokens = tokens(2, length, by_channel=by_channel, most=2.0)
    inputs = [*of_tokens, torch.randn(2, HEADS, KEY, VALUE, dtype=torch.float64)]
    weights = torch.randn(2, length, HEADS, VALUE, dtype=torch.float64), torch.randn(2, HEADS, KEY, VALUE, dtype=torch.float64)

    def gradients(reads: Tensor, state: Tensor, of: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad((weights[0] * reads).sum() + (weights[1] * state).sum(), of))

    ours = [t.clone().requires_grad_() for t in inputs]
    found = gated_delta_rule(*ours, chunk=chunk)
    theirs = [t.clone().requires_grad_() for t in inputs]
    rows = [one_by_one(*(t[row] for t in theirs)) for row in range(2)]
    expected = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    for one, other in zip(gradients(*found, ours), gradients(*expected, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("decay", [1e-3, 1.0, 40.0])
def test_float32_is_exact_whether_states_are_kept_or_forgotten(decay: float, by_channel: bool) -> None:
    exact = [*tokens(1, 300, decay=decay, by_channel=by_channel), torch.zeros(1, HEADS, KEY, VALUE, dtype=torch.float64)]
    inputs = [t.float().requires_grad_() for t in exact]
    found, state = gated_delta_rule(*inputs)
    expected, expected_state = one_by_one(*(t[0] for t in exact))
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(state[0].double(), expected_state, rtol=0, atol=2e-6)
    (found.sum() + state.sum()).backward()
    assert all(bool(t.grad.isfinite().all()) for t in inputs if t.grad is not None)


def units() -> list[Unit]:
    """Prompts shorter and longer than a convolution, with one response, three and single-token ones."""
    generator = torch.Generator().manual_seed(11)

    def ids(length: int) -> Tensor:
        return torch.randint(0, 50, (length,), generator=generator)

    shape = ((1, (9, 2, 30)), (2, (5, 4)), (17, (12,)), (40, (1, 3, 8)))
    found, index = [], 0
    for prompt, lengths in shape:
        responses = []
        for length in lengths:
            responses.append(Response(index, ids(length), torch.ones(length, dtype=torch.bool)))
            index += 1
        found.append(Unit(ids(prompt), responses))
    return found


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """What flash-linear-attention's kernel of the same arguments gives, written out; in BF16 it would not be exact."""
    reads, states = [], []
    for run, (start, end) in enumerate(pairwise(cu_seqlens)):
        own = [t[0, start:end].double() for t in (query * KEY**-0.5, key, value, g, beta)]
        read, state = one_by_one(*own, initial_state[run])
        reads.append(read)
        states.append(state)
    return torch.cat(reads)[None], torch.stack(states)


def rule_with(kernels: str, monkeypatch: pytest.MonkeyPatch, *, by_channel: bool) -> StateRule:
    if kernels == "plain":
        return plain_rule
    module = ModuleType("fla.ops.kda" if by_channel else "fla.ops.gated_delta_rule")
    setattr(module, "chunk_kda" if by_channel else "chunk_gated_delta_rule", kernel)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch, "bfloat16", torch.float64)
    return fla_rule(by_channel=by_channel)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="flash-linear-attention is installed")
def test_kernels_that_are_not_installed_are_named(by_channel: bool) -> None:
    with pytest.raises(ModelError, match=r"pip install flash-linear-attention, or set model\.layer_spec to 'reference'"):
        fla_rule(by_channel=by_channel)


@pytest.mark.parametrize("kernels", ["plain", "fla"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("by_channel", [False, True])
def test_every_response_reads_what_it_would_behind_its_prompt_alone(
    by_channel: bool, shared: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = rule_with(kernels, monkeypatch, by_channel=by_channel)
    stream = pack(units() if shared else split_shared_prompts(units()), pad_to_multiple=8)
    order = recurrence_of(stream, 4)
    assert len(order.stages) == (2 if shared else 1)
    of_id = [t.requires_grad_() for t in tokens(50, by_channel=by_channel)]
    taken = tuple(t[stream.token_ids] for t in of_id)
    states, found = (
        torch.zeros(1, HEADS, KEY, VALUE, dtype=torch.float64),
        torch.zeros(len(stream.token_ids), HEADS, VALUE).double(),
    )
    for stage in order.stages:
        runs = len(stage.boundaries) - 1
        before = states.expand(runs, -1, -1, -1) if stage.prefix is None else states[stage.prefix]
        at, read, states = rule(stage, taken, before)
        assert torch.equal(at.sort().values, stage.tokens.sort().values)
        found = found.index_copy(0, at, read)
    of_rows = found[stream.rows]
    expected = []
    for unit in units():
        for response in unit.responses:
            ids = torch.cat([unit.prompt_ids, response.token_ids])
            query, *others = (t[ids] for t in of_id)
            reads, _ = one_by_one(query * KEY**-0.5, *others, torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64))
            expected.append(reads[len(unit.prompt_ids) - 1 : -1])
    wanted = torch.cat(expected)
    torch.testing.assert_close(of_rows, wanted, rtol=1e-11, atol=1e-12)
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    ours = torch.autograd.grad((weights * of_rows).sum(), of_id, retain_graph=True)
    theirs = torch.autograd.grad((weights * wanted).sum(), of_id)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shared", [True, False])
def test_the_convolution_sees_the_prompt_and_no_other_sequence(shared: bool) -> None:
    stream = pack(units() if shared else split_shared_prompts(units()), pad_to_multiple=8)
    layer = CausalConvolution(6, 4, torch.float64)
    torch.nn.init.normal_(layer.weight)
    of_id = torch.randn(50, 6, dtype=torch.float64)
    found = layer(of_id[stream.token_ids], recurrence_of(stream, 4).taps, layer.weight)[stream.rows]
    expected = []
    for unit in units():
        for response in unit.responses:
            ids = torch.cat([unit.prompt_ids, response.token_ids])
            whole = torch.nn.functional.conv1d(of_id[ids].T, layer.weight, padding=3, groups=6)[:, : len(ids)]
            expected.append(torch.nn.functional.silu(whole.T)[len(unit.prompt_ids) - 1 : -1])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-12, atol=1e-13)
