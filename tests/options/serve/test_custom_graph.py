"""Custom losses: what the client traces computes the same here, and what is no operation of the list is refused unread."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megarl.options.serve.custom_graph import MAX_NODES, LossGraph, read_graph
from megarl.options.serve.values import RequestError

custom_loss = pytest.importorskip("tinker.lib.public_interfaces.custom_loss")
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def weighted(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * weights).sum(), {"custom/mean:mean": logprobs.mean(), "custom/tokens:sum": weights.sum()}


def clipped(logprobs: Tensor, advantages: Tensor, sampled: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = torch.exp(logprobs - sampled)
    bound = torch.clamp(ratio, min=0.8, max=1.2)
    loss = -torch.minimum(ratio * advantages, bound * advantages)
    return loss.sum() / logprobs.shape[0], {"custom/cut:sum": (ratio != bound).float().sum()}


def masked(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    chosen = logprobs[mask > 0]
    chosen = chosen + 1
    spread = functional.softplus(chosen - chosen.mean()).sum() + functional.logsigmoid(chosen[1:] - chosen[:-1]).sum()
    return spread + functional.huber_loss(chosen, torch.zeros_like(chosen), reduction="sum"), {}


def pairwise(logprobs: Tensor, order: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    picked = torch.gather(logprobs, 0, order)
    apart = picked[:, None] - logprobs[None]
    best = torch.where(apart > 0, apart, torch.full_like(apart, -math.inf)).logsumexp(dim=1)
    return torch.nan_to_num(best, neginf=0.0).sum() ** 2, {}


def several(logprobs: Tensor, target_distribution: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(target_distribution * logprobs).sum(-1).mul(scale).sum(), {}


FLOATS = torch.linspace(-1.0, 1.5, 6)
CASES: list[tuple[Loss, dict[str, Tensor]]] = [
    (weighted, {"weights": FLOATS}),
    (clipped, {"advantages": FLOATS, "sampled": -0.3 * FLOATS.abs()}),
    (masked, {"mask": (FLOATS > -0.6).float()}),
    (pairwise, {"order": torch.tensor([2, 1, 0, 5, 3, 4])}),
    (several, {"target_distribution": FLOATS.abs()[:, None].expand(6, 2), "scale": torch.tensor(0.5)}),
]


def sent(function: Loss, inputs: dict[str, Tensor], rank: int = 1) -> LossGraph:
    """The loss by the client's own tracing and encoding."""
    ranks = {"logprobs": rank, **{name: value.dim() for name, value in inputs.items()}}
    handle = custom_loss.trace_loss(function, ranks, "session")
    graph = custom_loss.encode_graph(handle).model_dump()
    return read_graph(handle.name, [(one.name, one.rank) for one in handle.inputs], graph)


@pytest.mark.parametrize(("function", "inputs"), CASES, ids=[function.__name__ for function, _ in CASES])
def test_a_traced_loss_computes_what_the_function_does(function: Loss, inputs: dict[str, Tensor]) -> None:
    log_probs = [-torch.rand(6, 2) if function is several else -torch.rand(6) for _ in range(2)]
    graph = sent(function, inputs, log_probs[0].dim())
    total, weights, metrics = graph.derivative(log_probs, [inputs, inputs])
    leaves = [values.clone().requires_grad_(True) for values in log_probs]
    answers = [function(leaf, *inputs.values()) for leaf in leaves]
    expected = sum(loss for loss, _ in answers)
    expected.backward()  # type: ignore[union-attr]
    assert total == pytest.approx(float(expected))
    for weight, leaf in zip(weights, leaves, strict=True):
        assert leaf.grad is not None
        assert torch.equal(weight, -leaf.grad)
    for name in answers[0][1]:
        values = [float(found[name]) for _, found in answers]
        assert metrics[name] == pytest.approx(sum(values) / (2 if name.endswith("mean") else 1))


def node(op: str, target: str, *args: Any, name: str = "a", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": [*args], "kwargs": kwargs}


LOGPROBS, REF = node("placeholder", "logprobs", name="x"), {"ref": "x"}
OUTPUT = node("output", "output", {"tuple": [{"ref": "a"}, {"dict": {}}]}, name="o")


def of(*nodes: dict[str, Any]) -> LossGraph:
    return read_graph("mine", [("logprobs", 1)], {"format": 1, "nodes": [LOGPROBS, *nodes, OUTPUT]})


@pytest.mark.parametrize(
    "attack",
    [
        node("call_function", "os.system", "true"),
        node("call_function", "builtins.eval", "1"),
        node("call_function", "torch.load", "file"),
        node("call_function", "torch.ops.aten.set_", REF),
        node("call_function", "torch.hub.load", "x"),
        node("call_method", "backward", REF),
        node("call_method", "__class__", REF),
        node("call_method", "add_", REF, 1),
        node("call_method", "numpy", REF),
        node("call_function", "getattr", REF, "__class__"),
        node("call_function", "getattr", REF, "grad_fn"),
        node("call_function", "getattr", REF, "data"),
        node("call_module", "linear", REF),
        node("get_attr", "weight"),
        node("call_function", "torch.exp", REF, out={"ref": "x"}),
        node("call_method", "to", REF, "cuda"),
        node("call_function", "torch.add", {"ref": "later"}, 1),
        node("call_function", "torch.add", REF, {"pickle": "gASV"}),
        node("call_function", "torch.add", REF, {"dtype": "__class__"}),
        node("call_function", "torch.full", [4], 10**400),
        node("call_function", "torch.stack", [REF] * 300),
        node("call_function", "operator.setitem", REF, 0, 1),
        node("call_function", "torch.rand", 3),
        node("call_function", "torch.bernoulli", REF),
        node("call_function", "operator.matmul", REF, REF),
        {"op": "call_function", "name": "a"},
        {"op": "call_function", "name": ["a"], "target": "torch.exp", "args": [], "kwargs": {}},
    ],
    ids=str,
)
def test_what_is_no_operation_of_the_list_is_refused(attack: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"custom loss 'mine' has a node that is not allowed"):
        of(attack)


@pytest.mark.parametrize(
    "bomb",
    [
        node("call_method", "expand", REF, 10**9, -1),
        node("call_method", "repeat", REF, 10**9),
        node("call_function", "torch.zeros", [10**7, 10**5]),
        node("call_function", "torch.arange", 10**12),
        node("call_function", "operator.pow", 10, 10**9),
        node("call_function", "operator.mul", {"tuple": [1]}, 10**12),
        node("call_function", "math.exp", 1e9),
        node("call_function", "operator.getitem", REF, 10**6),
        node("call_function", "torch.gather", REF, 0, REF),
        node("call_function", "torch.add", REF, "sum"),
    ],
    ids=lambda bomb: bomb["target"],
)
def test_what_is_too_large_or_fails_is_the_clients_error(bomb: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="custom loss 'mine'"):
        of(bomb).derivative([torch.zeros(8)], [{}])


def test_a_product_of_all_pairs_is_refused_before_it_is_made() -> None:
    column = node("call_function", "operator.getitem", REF, {"tuple": [{"slice": [None, None, None]}, None]}, name="c")
    graph = of(column, node("call_function", "operator.mul", {"ref": "c"}, REF))
    assert graph.name == "mine"
    with pytest.raises(RequestError, match="would make 10000000000 numbers"):
        graph.derivative([torch.zeros(100_000)], [{}])


def test_graphs_that_are_none_are_refused() -> None:
    total = node("call_method", "sum", REF)
    with pytest.raises(RequestError, match="another format"):
        read_graph("mine", [("logprobs", 1)], {"format": 2, "nodes": [LOGPROBS, total, OUTPUT]})
    with pytest.raises(RequestError, match="nodes; there must be 1 to"):
        of(*[node("call_method", "sum", REF, name=f"n{number}") for number in range(MAX_NODES)])
    with pytest.raises(RequestError, match="must end with its one output"):
        read_graph("mine", [("logprobs", 1)], {"format": 1, "nodes": [LOGPROBS, total]})
    with pytest.raises(RequestError, match="they must be alike"):
        read_graph("mine", [("logprobs", 1), ("advantages", 1)], {"format": 1, "nodes": [LOGPROBS, total, OUTPUT]})
    with pytest.raises(RequestError, match="scalar loss"):
        of(node("call_method", "exp", REF)).derivative([torch.zeros(3)], [{}])
    with pytest.raises(RequestError, match="of rank 2, and loss 'mine' declared rank 1"):
        of(total).derivative([torch.zeros(3, 1)], [{}])
    with pytest.raises(RequestError, match="not finite"):
        of(node("call_method", "log", REF, name="l"), node("call_method", "sum", {"ref": "l"})).derivative(
            [torch.zeros(3)], [{}]
        )
