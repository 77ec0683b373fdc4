"""Counts what code asks of a device while it runs on a CPU: kernel launches, bytes, operations, synchronisations, copies.

A call of an aten operator is one launch, unless it makes a view or allocates; torch's own kernels for the device may need more.
A function that stands for kernels that a CPU cannot run says itself how many (`standing_for`).
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
COUNTED = ("megarl/", "megatron/", "transformer_engine/")
"""Beginnings of the files that places name."""
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh", "_unsafe_view",
    "resize_", "set_", "_reshape_alias", "_local_scalar_dense", "is_same_size", "record_stream", "is_pinned",
}  # fmt: skip
"""Operators without a kernel; a scalar that is read is a synchronisation, and no launch."""
OWN_NAMESPACES = ("aten", "prims")
"""torch's. The operators of others are functions around kernels that stand-ins count."""
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


_active: list[Counts] = []
"""What the contexts of `counting` that are open count into."""
_nested = 0
"""How many calls of functions that stand for kernels are running: what they compute with is not counted."""


def standing_for(kernels: int | Callable[..., int], function: Callable[..., Any], name: str = "", flops: Any = None) -> Any:
    """`function`, each call of which counts as so many launches of kernels, whatever it calls itself.

    `kernels` and `flops`, if they are functions, are called with the call's own arguments, `flops` with the result first. Bytes
    are those of the tensors that go in and come out.
    """

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        global _nested
        _nested += 1
        try:
            result = function(*args, **kwargs)
            if _nested == 1:
                launched = kernels(*args, **kwargs) if callable(kernels) else kernels
                operations = int(flops(result, *args, **kwargs)) if flops is not None else 0
                for counts in _active:
                    counts.launches[f"{name or function.__name__} at {_place()[0]}"] += launched
                    counts.flops += operations
                    counts.bytes += _bytes(args, kwargs, result)
        finally:
            _nested -= 1
        return result

    return stand_in


def waited(name: str) -> None:
    """Count a wait that no operator of torch is."""
    for counts in _active if not _nested else ():
        counts.waits[f"{name} at {_place()[0]}"] += 1


def in_main_memory(tensor: Tensor) -> Tensor:
    """A copy of `tensor` that is in main memory also where there is a GPU: to read it is no wait."""
    copy: Tensor = standing_for(0, lambda: tensor.detach().clone(), "copy to main memory")()
    copy.is_in_main_memory = True  # type: ignore[attr-defined]
    return copy


def _bytes(*of: Any) -> int:
    """Of the tensors among these, each once."""
    tensors = {id(tensor): tensor for tensor in tree_iter(of) if isinstance(tensor, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


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
        stack.enter_context(_Calls(counts, lambda: not _nested and is_on()))
        stack.enter_context(_Operators(counts, lambda: not _nested and is_on()))
        _active.append(counts)
        stack.callback(_active.remove, counts)
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
            if not on_host and not _is_in_main_memory(args):
                self.counts.waits[f"{name} at {place}"] += 1
        if name in FREE or function.is_view or (name == "_to_copy" and result is args[0]):
            return result
        place, on_host = _place()
        if on_host:
            return result
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts.collectives[f"{name} at {place}"] += 1
            return result
        if function.namespace not in OWN_NAMESPACES:  # an operator made of others: what it launches is counted below it
            return result
        self.counts.launches[f"{name} at {place}"] += 1
        self.counts.flops += _flops(name, function, args, kwargs, result)
        self.counts.bytes += _bytes(args, kwargs, result)
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
        result = function(*args, **kwargs)
        if name == "tensor" and kwargs.get("device") == "cpu":
            result.is_in_main_memory = True
        return result

    def _kind(self, name: str, args: Any, kwargs: dict[str, Any]) -> Counter[str] | None:
        """Where a call is counted besides its operators, if anywhere."""
        if _is_in_main_memory(args):
            return None
        if name == "__getitem__" and any(isinstance(at, Tensor) and at.dtype == torch.bool for at in _places(args[1])):
            return self.counts.waits
        if name == "tensor" and kwargs.get("device") not in (None, "cpu"):  # as text: megarl's platform puts in no text
            return self.counts.copies
        if name == "to" and any(isinstance(given, torch.device) for given in (*args[1:], kwargs.get("device"))):
            return self.counts.copies if _place()[1] else None
        if name == "cpu":
            return self.counts.waits
        if name == "numpy" or (name == "tolist" and args[0].dim()):
            return None if _place()[1] else self.counts.waits
        return None


def _is_in_main_memory(args: Any) -> bool:
    return bool(args) and getattr(args[0], "is_in_main_memory", False)


def _places(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _place() -> tuple[str, bool]:
    """The innermost function of megarl or megatron-core that is running, as `file:function`, and whether it is below `HOST`."""
    frame: FrameType | None = sys._getframe(2)
    found, on_host = "", False
    while frame is not None:
        name = frame.f_code.co_filename
        short = name.removeprefix(ROOT + "/") if name.startswith(ROOT + "/megarl") else name.rpartition("site-packages/")[2]
        if not found and short.startswith(COUNTED) and not short.startswith("megarl/platform/"):
            found = f"{short}:{frame.f_code.co_name}"
        if (short, frame.f_code.co_name) in HOST:
            on_host = True
            break
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    if node is not None and not found.endswith(":backward"):
        found = f"the backward pass of {node.name().rstrip('0')}"
    return found or "no file of megarl", on_host
