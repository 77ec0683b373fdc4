"""A custom loss that a client traced, rebuilt from data: nodes in order, operations of a list, limits of size; no code is read.

It runs in the driver, for one datum after another, on log-probs of a forward pass. Its derivative goes to the ranks as weights
of cross-entropy, so that no rank ever runs what a client sent.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.options.serve.graph_operations import (
    ATTRIBUTES,
    FUNCTIONS,
    KEYWORDS,
    NUMERIC,
    TENSOR_METHODS,
    TEXTS,
    Size,
    check_number,
    check_numbers,
)
from megarl.options.serve.values import RequestError

MAX_NODES = 2_000
MAX_INPUTS = 16
MAX_DEPTH = 8
MAX_ENTRIES = 256
"""Entries of a list, tuple or dict among a node's arguments."""
MAX_ELEMENTS = 2**24
"""Elements of one tensor, and four times as many of all that a datum's graph makes."""
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "bool")}
_CONSTANTS: dict[str, dict[str, Any]] = {
    "dtype": _DTYPES,
    "device": {"cpu": torch.device("cpu")},
    "layout": {"strided": torch.strided},
    "memory_format": {"contiguous_format": torch.contiguous_format, "preserve_format": torch.preserve_format},
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}


@dataclass(frozen=True)
class _Node:
    """An operation: `op` and `target` as torch.fx has them, and its arguments as the client encodes them, checked."""

    name: str
    op: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class LossGraph:
    """A loss per datum: of log-probs and `inputs` (name and number of dimensions; log-probs first) a loss and metrics."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    nodes: tuple[_Node, ...]

    def run(self, values: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a scalar, and metrics of one datum.

        Raises:
            RequestError: an operation does not take its arguments, or would make too large a tensor.
        """
        known: dict[str, Any] = {}
        given, made = iter(values), 0
        for node in self.nodes:
            if node.op == "placeholder":
                known[node.name] = next(given)
                continue
            args = [_decoded(arg, known) for arg in node.args]
            kwargs = {name: _decoded(arg, known) for name, arg in node.kwargs.items()}
            if node.op == "output":
                return self._result(args[0])
            try:
                result = _computed(node, args, kwargs)
            except (
                RuntimeError,
                TypeError,
                ValueError,
                IndexError,
                ArithmeticError,
                AttributeError,
                NotImplementedError,
            ) as error:
                raise self._wrong(f"{node.target} at node '{node.name}' fails: {_first_line(error)}") from None
            made += sum(tensor.numel() for tensor in _tensors(result))
            if made > 4 * MAX_ELEMENTS:
                raise self._wrong(f"makes more than {4 * MAX_ELEMENTS} numbers of a datum")
            known[node.name] = result
        raise self._wrong("has no output")

    def derivative(
        self, log_probs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
    ) -> tuple[float, list[Tensor], dict[str, float]]:
        """The sum of the data's losses, −∂loss/∂log-probs of each datum in the shape of its log-probs, and metrics.

        Raises:
            RequestError: a datum lacks an input or has it with other dimensions, or the loss or its derivative is not finite.
        """
        total, sums = 0.0, dict[str, float]()
        weights: list[Tensor] = []
        for number, (of_datum, given) in enumerate(zip(log_probs, inputs, strict=True)):
            leaf = of_datum.clone().requires_grad_(True)
            loss, metrics = self.run([leaf, *self._inputs(number, leaf, given)])
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True) if loss.requires_grad else (None,)
            weights.append(torch.zeros_like(of_datum) if gradient is None else -gradient)
            total += float(loss.detach())
            if not (math.isfinite(total) and bool(weights[-1].isfinite().all())):
                raise self._wrong(f"gives a loss or derivative of datum {number} that is not finite")
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        return total, weights, {name: value / len(weights) if name.endswith(":mean") else value for name, value in sums.items()}

    def _inputs(self, number: int, log_probs: Tensor, given: Mapping[str, Tensor]) -> list[Tensor]:
        found = []
        for place, (name, dimensions) in enumerate(self.inputs):
            if place and name not in given:
                raise RequestError(f"datum {number} has no loss_fn_inputs['{name}'], which loss '{self.name}' reads")
            values = given[name] if place else log_probs
            if values.dim() != dimensions:
                raise RequestError(
                    f"datum {number} has {name} of rank {values.dim()}, and loss '{self.name}' declared rank {dimensions}"
                )
            found.append(values)
        return found[1:]

    def _result(self, result: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = result
        metrics = {name: torch.as_tensor(value) for name, value in metrics.items()}
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            raise self._wrong("must return a scalar loss")
        if any(value.numel() != 1 for value in metrics.values()):
            raise self._wrong("must return metrics of one number each")
        return loss, metrics

    def _wrong(self, what: str) -> RequestError:
        return RequestError(f"custom loss '{self.name}' {what}")


def read_graph(name: str, inputs: Sequence[tuple[str, int]], graph: Mapping[str, Any]) -> LossGraph:
    """A loss of the data that `create_custom_loss` sends: its inputs by name and rank, and `graph` with `format` and `nodes`.

    Raises:
        RequestError: an operation is none of the list, or the graph is too large or none.
    """

    def wrong(what: str) -> RequestError:
        return RequestError(f"custom loss '{name}' {what}")

    nodes = graph.get("nodes")
    if graph.get("format") != 1 or not isinstance(nodes, Sequence):
        raise wrong("has a graph of another format; it must be 1")
    if not 0 < len(nodes) <= MAX_NODES:
        raise wrong(f"has {len(nodes)} nodes; there must be 1 to {MAX_NODES}")
    if not 0 < len(inputs) <= MAX_INPUTS or inputs[0][0] != "logprobs" or inputs[0][1] not in (1, 2):
        raise wrong(f"has inputs that are none; they must be 1 to {MAX_INPUTS}, and the first logprobs of rank 1 or 2")
    if any(not _INPUT.fullmatch(one) or rank not in (0, 1, 2) for one, rank in inputs) or len(dict(inputs)) < len(inputs):
        raise wrong("has an input without a proper name or with a rank that is not 0, 1 or 2")
    read: list[_Node] = []
    known: set[str] = set()
    for node in nodes:
        try:
            one = _Node(node["name"], node["op"], node["target"], tuple(node["args"]), dict(node["kwargs"]))
            _check_node(one, known)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise wrong(f"has a node that is not allowed: {_first_line(error)}") from None
        known.add(one.name)
        read.append(one)
    placeholders = [node.target for node in read if node.op == "placeholder"]
    if placeholders != [one for one, _ in inputs]:
        raise wrong(f"takes {', '.join(placeholders)}, and declares {', '.join(one for one, _ in inputs)}; they must be alike")
    if [node.op for node in read].count("output") != 1 or read[-1].op != "output":
        raise wrong("must end with its one output")
    return LossGraph(name, tuple((one, rank) for one, rank in inputs), tuple(read))


def _check_node(node: _Node, known: set[str]) -> None:
    """Raise ValueError unless the node is an operation of the list on nodes before it."""
    if not all(isinstance(text, str) and 0 < len(text) <= 128 for text in (node.name, node.target)) or node.name in known:
        raise ValueError("a name that is none or comes twice")
    for arg in (*node.args, *node.kwargs.values()):
        _check_argument(arg, known, 0)
    if node.op == "output":
        _check_output(node)
        return
    names = [arg for arg in node.args if isinstance(arg, str)]
    if node.op == "call_function" and node.target == "getattr":
        if len(node.args) != 2 or names != [node.args[1]] or names[0] not in ATTRIBUTES or node.kwargs:
            raise ValueError(f"getattr of {node.args[1:]}, which must be one of {', '.join(sorted(ATTRIBUTES))}")
        return
    texts = [*names, *(arg for arg in node.kwargs.values() if isinstance(arg, str))]
    if not set(texts) <= TEXTS or not node.kwargs.keys() <= KEYWORDS:
        raise ValueError(f"an argument of {node.target}")
    is_known = {
        "placeholder": not node.args and not node.kwargs,
        "call_function": node.target in FUNCTIONS or node.target in NUMERIC or node.target == "operator.getitem",
        "call_method": node.target in TENSOR_METHODS and bool(node.args),
    }
    if not is_known.get(node.op, False):
        raise ValueError(f"{node.op} of {node.target}")


def _check_output(node: _Node) -> None:
    [result] = node.args
    parts = result["tuple"] if isinstance(result, dict) and "tuple" in result else result
    if not isinstance(parts, list) or len(parts) != 2 or not isinstance(parts[1], dict):
        raise ValueError("an output that is not (loss, metrics)")
    metrics = parts[1].get("dict")
    if not isinstance(metrics, dict) or not all(_METRIC.fullmatch(name) for name in metrics):
        raise ValueError("a metric that is not called custom/<name>:sum or custom/<name>:mean")


def _check_argument(arg: Any, known: set[str], depth: int) -> None:
    """Raise ValueError unless an encoded argument is one of those that the client makes."""
    content: Any
    entries: Any
    if depth > MAX_DEPTH:
        raise ValueError("arguments that are nested too deeply")
    if isinstance(arg, list):
        entries = arg
    elif isinstance(arg, dict):
        kind, content = next(iter(arg.items())) if len(arg) == 1 else ("", None)
        if kind == "ref" and content in known:
            return
        if kind in _CONSTANTS and content in _CONSTANTS[kind]:
            return
        if kind == "ellipsis":
            return
        entries = content if kind in ("tuple", "slice") else list(content.values()) if kind == "dict" else None
        if not isinstance(entries, list) or (kind == "slice" and len(entries) != 3):
            raise ValueError(f"an argument {str(arg)[:64]}")
    else:
        if not isinstance(arg, bool | int | float | str | None):
            raise ValueError(f"an argument {str(arg)[:64]}")
        check_number(arg)
        return
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"an argument of more than {MAX_ENTRIES} entries")
    for entry in entries:
        _check_argument(entry, known, depth + 1)


def _decoded(arg: Any, known: Mapping[str, Any]) -> Any:
    """An argument's value; it has been checked."""
    if isinstance(arg, list):
        return [_decoded(entry, known) for entry in arg]
    if not isinstance(arg, dict):
        return arg
    [(kind, content)] = arg.items()
    if kind == "ref":
        return known[content]
    if kind in _CONSTANTS:
        return _CONSTANTS[kind][content]
    if kind == "ellipsis":
        return Ellipsis
    if kind == "dict":
        return {name: _decoded(entry, known) for name, entry in content.items()}
    entries = [_decoded(entry, known) for entry in content]
    return slice(*entries) if kind == "slice" else tuple(entries)


def _computed(node: _Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operation, which is made only if it is not too large."""
    name = node.target
    if node.op == "call_method":
        if not isinstance(args[0], Tensor):
            raise TypeError(f"it is a method of tensors, not of a {type(args[0]).__name__}")
        return _sized(getattr(Tensor, name), TENSOR_METHODS[name], args, kwargs)
    if name == "getattr":
        if not isinstance(args[0], Tensor | tuple):
            raise TypeError("it is asked of no tensor")
        return getattr(args[0], args[1])
    if name == "operator.getitem":
        return _item(*args)
    if name in FUNCTIONS:
        function, size = FUNCTIONS[name]
        return _sized(function, size, args, kwargs)
    check_numbers(name, args)
    result = _sized(NUMERIC[name], Size.BROADCAST, args, kwargs)
    check_number(result)
    return result


def _item(whole: Any, index: Any) -> Any:
    """`whole[index]` of a tensor, a size or several results."""
    if not isinstance(whole, Tensor):
        if not isinstance(whole, tuple | list) or not isinstance(index, int | slice):
            raise TypeError("its index must be a number or a slice")
        return whole[index]
    indices = index if isinstance(index, tuple) else (index,)
    masks = [one for one in indices if isinstance(one, Tensor) and one.dtype == torch.bool]
    if masks:  # the result depends on values, and has no more elements than `whole` if it alone chooses
        if len(indices) > 1:
            raise TypeError("a mask must be its only index")
        return whole[index]
    return _sized(operator.getitem, Size.COMPUTED, [whole, index], {})


def _sized(function: Callable[..., Any], size: Size, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if size is Size.BROADCAST:
        shapes = {tensor.shape for tensor in _tensors([args, kwargs])}
        elements = math.prod(torch.broadcast_shapes(*shapes)) if len(shapes) > 1 else 0
    elif size is Size.COMPUTED:
        with torch.device("meta"):
            elements = sum(tensor.numel() for tensor in _tensors(function(*_on_meta(args), **_on_meta(kwargs))))
    else:
        elements = 0
    if elements > MAX_ELEMENTS:
        raise ValueError(f"it would make {elements} numbers, and {MAX_ELEMENTS} are allowed")
    return function(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    """The same with tensors that have a shape and no content."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_on_meta(entry) for entry in value)
    return {name: _on_meta(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    return [tensor for entry in value for tensor in _tensors(entry)] if isinstance(value, list | tuple) else []


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
