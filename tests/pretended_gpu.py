"""A GPU that a process without one is told it has: tensors say that they are on `cuda:0`, and their values are in main memory.

Import this before megarl's platform is installed, as `World(first="tests.pretended_gpu")`
does: the process has the platform of a GPU, unpatched megatron-core and no kernel of a GPU. Every operator of torch is computed
on a CPU, after what CUDA would refuse was refused: tensors of two devices in one operator, a collective on main memory.
Autograd, optimizers and Gloo are torch's own. Not pretended are streams (all is done when a call returns), pinned memory,
Triton, compiled functions and Transformer Engine.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from megarl import platform
from megarl.platform.after_import import act_after_import
from megarl.platform.cpu_redirects import CpuEvent, CpuStream, _rng_redirects

GPU = torch.device("cuda", 0)
BETWEEN_DEVICES = {"_to_copy", "copy_", "copy", "_foreach_copy_", "_copy_from"}
"""Operators that take tensors of two devices."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operators whose indices CUDA takes from main memory: it copies them, which the host waits for."""
RESIZING = {"resize_", "set_", "resize_as_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_"}
"""Operators that change what their first tensor is, beside its values."""
OF_MAIN_MEMORY = {"is_pinned", "_pin_memory"}


def _added_product(total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor, **factors: Any) -> Tensor:
    """`addmm` of bfloat16 into float32."""
    return out.copy_(torch.addmm(total, left.to(dtype), right.to(dtype), **factors))


def _norm_backward(
    gradient: Tensor, values: Tensor, shape: Any, inverse: Tensor, weight: Tensor | None, wanted: Any
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the values and the weight of a norm by the root mean square over the last axis."""
    normed = values.float() * inverse
    scaled = gradient.float() if weight is None else gradient.float() * weight.float()
    of_values = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * inverse
    if weight is None:
        return of_values.to(values.dtype), None
    return of_values.to(values.dtype), (gradient.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)


ON_GPUS_ALONE = {
    torch.ops.aten.addmm.dtype_out: _added_product,
    torch.ops.aten._fused_rms_norm_backward.default: _norm_backward,
}
"""Operators that torch has no kernel of for a CPU."""


class OnGpu(Tensor):
    """A tensor that says it is on `cuda:0`; its storage is in main memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        """The same storage as `values`, a tensor in main memory."""
        return Tensor._make_subclass(cls, values, False, dispatch_device=True, device_for_backend_keys=GPU)  # type: ignore

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return GPU if function is torch.ops.prim.device.default else _computed(function, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnGpu({in_main_memory(self)})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: Any) -> OnGpu:
        with torch.no_grad():
            copy = self.detach().clone().requires_grad_(self.requires_grad)
        copy.__dict__.update(self.__dict__)
        memo[id(self)] = copy
        return copy  # type: ignore[return-value]


def in_main_memory(tensor: Tensor) -> Tensor:
    """The values of a tensor: the same storage, without a copy."""
    with torch._C._DisableTorchDispatch():
        storage, offset, shape, stride = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, offset, shape, stride)


watchers: list[Callable[[Any, Any, Any, Any], None]] = []
"""Called with each operator, its arguments and its result, wherever a tensor of the GPU is among them."""


def _computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function._schema.name.partition("::")[2]
    _refuse(function, name, args, kwargs)
    device = kwargs.get("device")
    asked = torch.device(device) if device is not None else None
    outer: dict[int, Tensor] = {}

    def inner(value: Any) -> Any:
        if isinstance(value, OnGpu):
            values = in_main_memory(value)
            outer[id(values)] = value
            return values
        return value

    given = tree_map(inner, (args, kwargs))
    on_gpu = bool(outer) if asked is None else asked.type == "cuda"
    named = {key: value for key, value in given[1].items() if key != "pin_memory"}
    if asked is not None and asked.type == "cuda":
        named["device"] = torch.device("cpu")
    if name == "_to_copy" and on_gpu != bool(outer):
        named.pop("non_blocking", None)
    result = ON_GPUS_ALONE.get(function, function)(*given[0], **named)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, OnGpu):
            return value
        if id(value) in outer:
            if name in RESIZING:
                with torch.no_grad():
                    outer[id(value)].data = OnGpu(value)
            return outer[id(value)]
        return OnGpu(value) if on_gpu and value.device.type == "cpu" else value

    found = tree_map(wrapped, result)
    if outer or on_gpu:
        for watcher in watchers:
            watcher(function, args, kwargs, found)
    return found


def _refuse(function: Any, name: str, args: Any, kwargs: Any) -> None:
    """Raise what CUDA would, if an operator has tensors of both devices and is none of those that may."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    here = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.device.type == "cpu"]
    if function.namespace in ("c10d", "_c10d_functional") and here:
        raise RuntimeError(f"No backend type associated with device type cpu: {function}")
    if not here or len(here) == len(tensors) or name in BETWEEN_DEVICES:
        return
    if name in INDEXED and isinstance(args[0], OnGpu) and all(isinstance(value, OnGpu) for value in args[2:3]):
        return
    large = [tensor for tensor in here if tensor.dim()]
    if large:
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device: {function} of {shapes}")


class _Factories(TorchDispatchMode):
    """Operators that make tensors of the GPU out of none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return GPU
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None and not any(issubclass(kind, OnGpu) for kind in types) and function.namespace != "c10d":
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)
        return _computed(function, args, kwargs)


@contextmanager
def the_gpu() -> Iterator[None]:
    """Inside, in this thread, factories make tensors of the GPU where they are asked to, and backward passes stay in it."""
    with _Factories(), torch.autograd.set_multithreading_enabled(False):
        yield


def _set_data(tensor: Tensor, values: Tensor) -> None:
    """`tensor.data = values`, with which `module.to("cuda")` moves weights: the tensor stays the one that others hold."""
    if isinstance(values, OnGpu) and not isinstance(tensor, OnGpu):
        moved = OnGpu(in_main_memory(values)).requires_grad_(tensor.requires_grad)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        torch._C._swap_tensor_impl(tensor, moved)
        tensor.__class__ = OnGpu
        if is_parameter:
            tensor._is_param = True
        return
    _DATA.__set__(tensor, values)


_DATA: Any = torch._C.TensorBase.data


def _tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **settings: Any) -> Tensor:
    """`torch.tensor`, which passes by all that watches operators."""
    data = tree_map(lambda value: value.tolist() if isinstance(value, OnGpu) else value, data)
    return _TENSOR(data, **settings) if device is None else _TENSOR(data, **settings).to(device)


_TENSOR = torch.tensor


def begin() -> None:
    """From here on, in this thread, factories make tensors of the GPU where they are asked to."""
    _Factories().__enter__()


class _Stream(CpuStream):
    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    cuda_stream = 0


class _Event(CpuEvent):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _give_torch_a_gpu() -> None:
    """Have torch's C++ believe that its build has CUDA and one kind of device, whose guard does nothing.

    A build for CPUs has no guard for CUDA and says so wherever a tensor is sliced or differentiated. torch puts a stand-in
    of its own in place of a guard that counts no devices, so such a one is made. Whether there is CUDA is asked of an object
    with a table of functions, of which two are replaced: `isBuilt` and `hasPrimaryContext`.
    """
    folder = Path(torch.__file__).parent / "lib"
    nothing = _NUMBER(lambda this: 0)
    guard = ctypes.pointer((ctypes.c_void_p * 64)(*[ctypes.cast(nothing, ctypes.c_void_p).value] * 64))
    guards = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(str(folder / "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()

    find = ctypes.CDLL(str(folder / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    find.restype = ctypes.c_void_p
    hooks = ctypes.cast(find(), ctypes.POINTER(ctypes.c_void_p))
    functions = (ctypes.c_void_p * FUNCTIONS)(*ctypes.cast(hooks[0], ctypes.POINTER(ctypes.c_void_p))[:FUNCTIONS])
    is_built = _NUMBER(lambda this: 1)
    functions[2] = ctypes.cast(is_built, ctypes.c_void_p).value  # behind the two of a destructor: isBuilt, isAvailable,
    functions[4] = guard[0][0]  # hasPrimaryContext
    hooks[0] = ctypes.addressof(functions)
    _KEPT.extend([nothing, guard, functions, is_built])


FUNCTIONS = 128
_NUMBER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_KEPT: list[Any] = []


def _pretend() -> None:
    _give_torch_a_gpu()
    platform.cuda_present = lambda: True
    torch.utils._triton.has_triton_package = lambda: False  # type: ignore[assignment]
    only_stream = _Stream()
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="a pretended GPU")
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "_lazy_init": None, "init": None, "set_device": None, "synchronize": None,
        "empty_cache": None, "current_device": GPU, "device_count": 1, "get_device_capability": (9, 0), "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "get_device_properties": properties,
        "get_device_name": properties.name, "current_stream": only_stream, "default_stream": only_stream,
        "is_current_stream_capturing": False, "is_bf16_supported": True, "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *unused, answer=answer, **also_unused: answer)
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # type: ignore
    torch.cuda.device = torch.cuda.stream = lambda *unused: the_gpu()  # type: ignore
    for owner, attribute, replacement in _rng_redirects():
        setattr(owner, attribute, replacement)
    Tensor.pin_memory = lambda tensor, *unused: tensor  # type: ignore
    Tensor.record_stream = lambda tensor, stream: None  # type: ignore
    Tensor.cuda = lambda tensor, *unused, **also_unused: tensor.to(GPU)  # type: ignore
    torch.tensor = _tensor  # type: ignore
    Tensor.data = property(_DATA.__get__, _set_data)  # type: ignore
    torch.distributed.distributed_c10d._get_object_coll_device = lambda group=None: GPU  # type: ignore
    act_after_import("megatron.core.jit", lambda jit: jit.disable_jit_fuser())


if "megatron.core" in sys.modules:
    raise RuntimeError("tests.pretended_gpu was imported after megatron.core")
_pretend()
