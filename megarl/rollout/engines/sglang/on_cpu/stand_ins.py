"""Stand-ins that let an unpatched SGLang import on a machine without CUDA; used inside the server's processes alone.

SGLang imports CUDA kernel packages (`sgl_kernel`, `triton`) that its CPU path never calls, and torchvision, whose compiled
operators do not load beside a CPU build of torch. Everything here imports; whatever is called raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

STAND_INS = ("triton", "sgl_kernel")
ABSENT_FOR_GOOD = ("triton.knobs",)  # SGLang asks for it, copes with its absence, and would add a hook to it


class Absent:
    """A name of a package that is not here: it can be imported, subclassed by reference or used as an annotation."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}: not available on this machine>"

    def __getattr__(self, attribute: str) -> Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.name}.{attribute}")

    def __getitem__(self, item: Any) -> Absent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.name} was called, which needs CUDA; SGLang's CPU path does not call it")


class AbsentKernel(Absent):
    """A kernel defined with `@triton.jit` or `@triton.autotune`: defining it is fine, launching it is not."""


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """`@jit`, `@jit(...)`, `@autotune(...)`, `@heuristics(...)`: the function becomes a kernel that cannot be launched."""
    if len(args) == 1 and not kwargs and (callable(args[0]) or isinstance(args[0], Absent)):
        return AbsentKernel(getattr(args[0], "__name__", repr(args[0])))
    return lambda function: AbsentKernel(getattr(function, "__name__", repr(function)))


class AbsentClass:
    """Base of the classes of a package that is not here: they serve `isinstance` and annotations, not construction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} was made, which needs CUDA; SGLang's CPU path does not make it")


class Config:
    """`triton.Config`: the arguments of a kernel variant, which nobody will read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


TRITON_NAMES: dict[str, Any] = {
    "__version__": "0.0.0",
    "jit": _decorator,
    "autotune": _decorator,
    "heuristics": _decorator,
    "Config": Config,
    "cdiv": lambda x, y: -(-x // y),
    "constexpr": lambda value: value,
    "next_power_of_2": lambda n: 1 if n <= 1 else 2 ** math.ceil(math.log2(n)),
}


class AbsentModule(ModuleType):
    """A module of which every public name is `Absent`."""

    def __getattr__(self, attribute: str) -> Any:
        if self.__name__.split(".")[0] == "triton" and attribute in TRITON_NAMES:
            return TRITON_NAMES[attribute]
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute[0].isupper():
            return type(attribute, (AbsentClass,), {"__module__": self.__name__})
        return Absent(f"{self.__name__}.{attribute}")


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `triton`, `sgl_kernel` and everything below them, after every other finder has failed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.packages or fullname in ABSENT_FOR_GOOD:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name, "Stand-in for a package that needs CUDA.")

    def exec_module(self, module: ModuleType) -> None:
        return None


def install(torchvision_folder: Path) -> None:
    """Make `import sglang` work in this process: stand-ins for the packages that are missing, and torchvision's operators.

    `torchvision_folder` is put at the end of `sys.path`; torchvision lives apart because beside a CPU build of torch it
    breaks `import transformers` in any process where its operators have not been declared. Beside a CUDA build (which is
    what Python 3.12 gets where there is no CPU build) its own operators load and declare themselves.
    """
    import torch

    missing = [name for name in STAND_INS if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_StandInFinder(missing))
    sys.path.append(str(torchvision_folder))
    if torch.version.cuda is None:
        _declare(torch.library.Library("torchvision", "DEF"), *TORCHVISION_OPERATORS)
    absent = [name for name in IMPORTED_OPERATORS if not hasattr(torch.ops.sgl_kernel, name)]
    _declare(torch.library.Library("sgl_kernel", "FRAGMENT"), *(f"{name}() -> ()" for name in absent))


_KEEP: list[Any] = []  # a torch.library.Library takes its declarations back when it is collected


IMPORTED_OPERATORS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip
"""Kernels of Qwen3.5, whose model SGLang imports with those of all Qwen models that see; only their names are asked for."""
TORCHVISION_OPERATORS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))


def _declare(library: Any, *operators: str) -> None:
    for operator in operators:
        library.define(operator)
    _KEEP.append(library)
