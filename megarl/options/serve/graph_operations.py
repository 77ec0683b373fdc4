"""The operations that a custom loss may be made of, by the names that torch.fx gives them, and how large their results can be.

Nothing here has side effects, draws numbers, writes into its arguments, or leaves torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.fx.node
from torch import Tensor
from torch.nn import functional


class Size(Enum):
    """Say how large the result of an operation is."""

    BROADCAST = "as its tensors are together"
    SMALLER = "at most as its largest tensor"
    COMPUTED = "to be computed before it is made"


_NAMES = {
    Size.BROADCAST: """
    abs neg exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sigmoid tanh sin cos relu erf sign floor ceil round
    trunc isnan isinf isfinite logical_not
    add sub mul div true_divide pow minimum maximum clamp clip clamp_min clamp_max where eq ne
    lt le gt ge logical_and logical_or logical_xor fmod remainder lerp addcmul addcdiv xlogy logaddexp nan_to_num masked_fill
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div softplus logsigmoid elu silu gelu masked_select
    """,
    Size.SMALLER: """
    sum mean prod max min amax amin argmax argmin logsumexp norm std var any all count_nonzero median dot softmax log_softmax
    cumsum cumprod logcumsumexp flip roll sort reshape view flatten squeeze unsqueeze transpose permute t narrow select split
    chunk unbind diff triu tril detach clone contiguous float double long int bool to type_as zeros_like ones_like full_like
    size dim numel
    """,
    Size.COMPUTED: "gather index_select take_along_dim expand expand_as repeat stack cat outer pad arange zeros ones full",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
TENSOR_METHODS: Mapping[str, Size] = {name: size for name, size in _SIZES.items() if hasattr(Tensor, name)}
"""Methods of tensors."""


def _of_torch() -> dict[str, tuple[Callable[..., Any], Size]]:
    """The functions of torch and torch.nn.functional, under the names that a client's torch.fx gives them."""
    found: dict[str, tuple[Callable[..., Any], Size]] = {}
    for name, size in _SIZES.items():
        for module, place in ((torch, "torch"), (functional, "torch.nn.functional")):
            if callable(function := getattr(module, name, None)):
                found[f"{place}.{name}"] = function, size
                found[torch.fx.node._get_qualified_name(function)] = function, size
    return found


FUNCTIONS: Mapping[str, tuple[Callable[..., Any], Size]] = _of_torch()
"""Functions that take tensors, or sizes."""

_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv", "ipow": "pow"}
_OPERATORS = "add sub mul truediv floordiv mod pow neg abs eq ne lt le gt ge and_ or_ xor not_ invert"
NUMERIC: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"operator.{name}": getattr(operator, plain) for name, plain in _IN_PLACE.items()},
    **{
        f"math.{name}": getattr(math, name) for name in ("exp", "log", "log2", "log10", "sqrt", "floor", "ceil", "tanh", "fabs")
    },
    "abs": abs,
    "round": round,
}
"""Operations on numbers or tensors; those on numbers alone have limits of their own (`check_numbers`)."""

ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT", "values", "indices"})
"""What `getattr` may ask of a tensor, or of what an operation with several results gives."""
_KEYWORDS = """
    dim dims keepdim dtype min max alpha beta value values reduction rounding_mode unbiased correction descending shifts index
    other input mask weight delta nan posinf neginf fill_value threshold p ord start end step size target log_target exponent
    tensors tensor split_size_or_sections chunks n sizes repeats pad mode dim0 dim1 length shape diagonal
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""Names of arguments: none in which an operation writes, and none that chooses a device."""
TEXTS = frozenset({"sum", "mean", "none", "floor", "trunc", "constant"})
"""Texts that are arguments of operations."""
LARGEST_NUMBER = 2.0**53


def check_numbers(name: str, arguments: Sequence[Any]) -> None:
    """Raise ValueError unless an operation on numbers alone is one that takes no time and no memory to speak of."""
    for value in arguments:
        if not isinstance(value, Tensor | bool | int | float | torch.dtype):
            raise ValueError(f"{name} of a {type(value).__name__}")
    if any(isinstance(value, Tensor) for value in arguments):
        return
    if name.rpartition(".")[2] in ("pow", "ipow") and abs(arguments[1]) > 64:
        raise ValueError("a power above 64")


def check_number(value: Any) -> None:
    """Raise ValueError where a number is beyond what float64 counts."""
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise ValueError("a number above 2**53")
