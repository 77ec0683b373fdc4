"""Counts what code asks of a device while it runs on a CPU: kernel launches, bytes, operations, synchronisations, copies.

A call of an aten operator is one launch, unless it makes a view or allocates; torch's own kernels for the device may need more.
What `HOST` names works in main memory also where there is a GPU: its operators are no launches, its `.to(device)` are copies.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

ROOT = str(Path(__file__).resolve().parent.parent)
HOST = {
    ("megarl/megatron/step.py", "_lay"),
    ("megarl/megatron/step.py", "metrics_on_host"),
    ("megarl/data/stream.py", "laid_tokens"),
}
"""Files and functions whose operators, and those of all that they call, work on tensors in main memory."""
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh", "_unsafe_view",
    "resize_", "set_", "_reshape_alias", "_local_scalar_dense", "is_same_size", "record_stream", "is_pinned",
}  # fmt: skip
"""Operators without a kernel; a scalar that is read is a synchronisation, and no launch."""
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal"}
"""Operators that return when the device has done all that was asked of it: their result, or its size, is in main memory."""


@dataclass
class Counts:
    """What was counted between two points; places are `operator at file:function`."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    bytes: int = 0

    def since(self, other: Counts) -> Counts:
        """This less `other`, place by place."""
        found = Counts(flops=self.flops - other.flops, bytes=self.bytes - other.bytes)
        for name in ("launches", "waits", "copies", "collectives"):
            mine, theirs = Counter(getattr(self, name)), getattr(other, name)
            mine.subtract(theirs)
            setattr(found, name, Counter({place: count for place, count in mine.items() if count}))
        return found

    def totals(self) -> dict[str, int]:
        """One number of each kind."""
        sums = {name: sum(getattr(self, name).values()) for name in ("launches", "waits", "copies", "collectives")}
        return {**sums, "flops": self.flops, "bytes": self.bytes}


@contextmanager
def counting(is_on: Callable[[], bool] = lambda: True) -> Iterator[Counts]:
    """Counts what this thread asks of the device, in forward and backward passes, whenever `is_on()`."""
    counts = Counts()
    before = torch.cuda.synchronize

    def synchronize(*arguments: Any, **named: Any) -> Any:
        if is_on():
            counts.waits[f"torch.cuda.synchronize at {_place()[0]}"] += 1
        return before(*arguments, **named)

    with ExitStack() as stack:
        torch.cuda.synchronize = synchronize
        stack.callback(setattr, torch.cuda, "synchronize", before)
        stack.enter_context(_Calls(counts, is_on))
        stack.enter_context(_Operators(counts, is_on))
        yield counts


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counts, is_on: Callable[[], bool]) -> None:
        super().__init__()
        self.counts, self.is_on = counts, is_on

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        if not self.is_on():
            return result
        if name in READS:
            place, on_host = _place()
            self.counts.waits[f"{name} at {place}"] += not on_host
        if name in FREE or function.is_view or (name == "_to_copy" and result is args[0]):
            return result
        place, on_host = _place()
        if on_host:
            return result
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts.collectives[f"{name} at {place}"] += 1
            return result
        self.counts.launches[f"{name} at {place}"] += 1
        self.counts.flops += _flops(name, function, args, kwargs, result)
        tensors = {id(tensor): tensor for tensor in tree_iter((args, kwargs, result)) if isinstance(tensor, Tensor)}
        self.counts.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return result


def _flops(name: str, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Of a product or an attention call, whose masked pairs count as well."""
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    counter = flop_registry.get(function.overloadpacket)
    return 0 if counter is None else int(counter(*args, **kwargs, out_val=result))


class _Calls(TorchFunctionMode):
    def __init__(self, counts: Counts, is_on: Callable[[], bool]) -> None:
        super().__init__()
        self.counts, self.is_on = counts, is_on

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if self.is_on():
            kind = self._kind(name, args, kwargs)
            if kind is not None:
                place, _ = _place()
                kind[f"{name} at {place}"] += 1
        return function(*args, **kwargs)

    def _kind(self, name: str, args: Any, kwargs: dict[str, Any]) -> Counter[str] | None:
        """Where a call is counted besides its operators, if anywhere."""
        if name == "__getitem__" and any(isinstance(at, Tensor) and at.dtype == torch.bool for at in _places(args[1])):
            return self.counts.waits
        if name == "tensor" and kwargs.get("device") is not None:
            return self.counts.copies
        if name == "to" and any(isinstance(given, torch.device) for given in (*args[1:], kwargs.get("device"))):
            return self.counts.copies if _place()[1] else None
        if name == "cpu":
            return self.counts.waits
        if name == "numpy" or (name == "tolist" and args[0].dim()):
            return None if _place()[1] else self.counts.waits
        return None


def _places(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _place() -> tuple[str, bool]:
    """The innermost function of megarl or megatron-core that is running, as `file:function`, and whether it is below `HOST`."""
    frame: FrameType | None = sys._getframe(2)
    found, on_host = "", False
    while frame is not None:
        name = frame.f_code.co_filename
        short = name.removeprefix(ROOT + "/") if name.startswith(ROOT + "/megarl") else name.rpartition("site-packages/")[2]
        if not found and short.startswith(("megarl/", "megatron/", "transformer_engine/")):
            found = f"{short}:{frame.f_code.co_name}"
        if (short, frame.f_code.co_name) in HOST:
            on_host = True
            break
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    if node is not None and not found.endswith(":backward"):
        found = f"the backward pass of {node.name().rstrip('0')}"
    return found or "no file of megarl", on_host
