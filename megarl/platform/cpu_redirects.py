"""Every change that lets unpatched megatron-core train on a CPU, as data: (owner, attribute, replacement).
Applied once per process by `megarl.platform.install()`, before megatron is imported and only where CUDA is absent.
Line numbers are megatron-core 0.16.1's."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils import _device

from megarl.platform.after_import import act_after_import
from megarl.platform.gloo import all_gather_by_pairs, all_gather_of_any_sizes, on_one_device, reduce_scatter_by_pairs

CPU = torch.device("cpu")


class Redirect(NamedTuple):
    """`owner.attribute` is to become `replacement`."""

    owner: Any
    attribute: str
    replacement: Any


def apply_redirects() -> None:
    """Put every redirect in force in this process and register those that wait for a megatron module."""
    # `with torch.device("meta")` recognises factories by identity in this cached set: fill it with the originals first,
    # and the originals are what the redirected factories still call.
    _device._device_constructors()
    for owner, attribute, replacement in redirects():
        setattr(owner, attribute, replacement)
    _expect_no_gpu_packages()
    act_after_import("megatron.core.jit", _do_not_compile)
    act_after_import("megatron.core.transformer.moe.moe_utils", _dispatch_experts_on_cpu)
    act_after_import("megatron.core.tensor_parallel.random", _share_one_generator)
    act_after_import("megatron.core.optimizer.clip_grads", _scale_in_place)
    act_after_import("megatron.core.tensor_parallel.layers", _add_weight_gradients)


def redirects() -> Iterator[Redirect]:
    """Yield every redirect of torch itself, group by group."""
    yield from _device_redirects()
    yield from _factory_redirects()
    yield from _stream_redirects()
    yield from _rng_redirects()
    yield from _tensor_redirects()
    yield from _collective_redirects()
    yield from _optimizer_redirects()
    yield Redirect(torch, "compile", _leave_as_it_is)


# --- the current device -----------------------------------------------------------------------------------------------


def _device_redirects() -> Iterator[Redirect]:
    # 175 places say `device=torch.cuda.current_device()`. Answering the CPU device itself (not an index) makes all of them
    # right without looking at a single tensor operation. torch.cuda.is_available() stays False: that is the truth.
    yield Redirect(torch.cuda, "current_device", lambda: CPU)
    # timers.py, pipeline_parallel/schedules.py, optimizer/*.py: nothing is ever pending on a CPU.
    yield Redirect(torch.cuda, "synchronize", lambda device=None: None)


# --- device="cuda" in factory calls -----------------------------------------------------------------------------------


def _factory_redirects() -> Iterator[Redirect]:
    # `device="cuda"`: optimizer.py:473, clip_grads.py:90, grad_scaler.py:15, schedules.py:596, transformer/utils.py:35,
    # exchange_utils.py:98-110. `pin_memory=True`: rope_utils.py:63, utils.py:2117.
    # A wrapper costs 0.2 us per factory call (0.6 us where a device is given); a TorchFunctionMode costs 1.1 us on *every*
    # operation, 5% of a 30-layer forward pass of few tokens.
    for name in ("empty", "empty_like", "ones", "tensor", "zeros"):
        yield Redirect(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that a CUDA `device` argument means the CPU and `pin_memory` is ignored."""

    @functools.wraps(factory)
    def redirected(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and _names_cuda(device):
                kwargs["device"] = CPU
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return redirected


def _names_cuda(device: torch.device | str | int) -> bool:
    """Say whether a device argument means a GPU: `"cuda"`, `"cuda:1"`, `torch.device("cuda")` or a bare index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or device.startswith("cuda")


# --- streams and events -----------------------------------------------------------------------------------------------


class CpuStream:
    """A stream on which everything is already done: there is nothing to order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: CpuStream) -> None: ...

    def record_event(self) -> CpuEvent:
        return CpuEvent()


class CpuEvent:
    """An event that has already happened."""

    def synchronize(self) -> None: ...


def _stream_redirects() -> Iterator[Redirect]:
    # moe/token_dispatcher.py:445 and 874-895, moe/shared_experts.py:123-269, distributed_data_parallel.py:230 and
    # param_and_grad_buffer.py:417-422 (several distributed optimizer instances).
    only_stream = CpuStream()
    yield Redirect(torch.cuda, "Stream", CpuStream)
    yield Redirect(torch.cuda, "current_stream", lambda device=None: only_stream)
    yield Redirect(torch.cuda, "default_stream", lambda device=None: only_stream)
    # torch.cuda.stream(...) is not among them: without a device torch makes it an empty context by itself.


# --- random numbers ---------------------------------------------------------------------------------------------------


class _OnlyGenerator:
    """Stands for `torch.cuda.default_generators`: whatever the index, it is the CPU's generator."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _rng_redirects() -> Iterator[Redirect]:
    # tensor_parallel/random.py:56 (_get_cuda_rng_state) and 74-110 (_set_cuda_rng_state, through _lazy_call and
    # default_generators); CudaRNGStatesTracker.add:199 uses the public three.
    def get_rng_state(device: object = "cuda") -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
        torch.default_generator.set_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    for owner in (torch.cuda, torch.cuda.random):
        yield Redirect(owner, "get_rng_state", get_rng_state)
        yield Redirect(owner, "set_rng_state", set_rng_state)
        yield Redirect(owner, "manual_seed", manual_seed)
    yield Redirect(torch.cuda, "default_generators", _OnlyGenerator())
    yield Redirect(torch.cuda, "_lazy_call", lambda callback, **kwargs: callback())


# --- methods of a tensor ----------------------------------------------------------------------------------------------


def _tensor_redirects() -> Iterator[Redirect]:
    original_type = torch.Tensor.type

    @functools.wraps(original_type)
    def type_as_on_cuda(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(tensor, dtype, non_blocking, **kwargs)
        name = original_type(tensor)
        return name.replace("torch.", "torch.cuda.", 1) if tensor.device.type == "cpu" else name

    # distrib_optimizer.py:361 and 420, optimizer.py:671 and 690, clip_grads.py:167 compare with 'torch.cuda.FloatTensor'.
    yield Redirect(torch.Tensor, "type", type_as_on_cuda)
    # language_module.py:244 (tied embeddings over pipeline stages), tensor_parallel/data.py:84, exchange_utils.py:336.
    yield Redirect(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)


# --- collectives ------------------------------------------------------------------------------------------------------


def _collective_redirects() -> Iterator[Redirect]:
    # mappings.py:232: expert tensor parallelism gathers as many tokens from each rank as it happens to have.
    yield Redirect(torch.distributed, "all_gather", all_gather_of_any_sizes(torch.distributed.all_gather))
    # param_and_grad_buffer.py:35 (gradients and weights of the distributed optimizer), mappings.py:12 (sequence parallelism).
    reduce_scatter = reduce_scatter_by_pairs(torch.distributed.reduce_scatter_tensor)
    yield Redirect(torch.distributed, "reduce_scatter_tensor", reduce_scatter)
    yield Redirect(torch.distributed, "all_gather_into_tensor", all_gather_by_pairs(torch.distributed.all_gather_into_tensor))
    # parallel_state.py makes 20 to 50 groups: with 18, their threads woke 1,630 times a second; one wakes 95 times.
    gloo = torch.distributed.ProcessGroupGloo
    yield Redirect(gloo, "__init__", on_one_device(gloo.__init__))


# --- optimizers that nobody compiles ----------------------------------------------------------------------------------


def _optimizer_redirects() -> Iterator[Redirect]:
    # torch/_compile.py:40 and optim/optimizer.py:61: an optimizer's first calls import torch's compiler, a second of a core and
    # 100 MB in every rank, to keep it from compiling them.
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        yield Redirect(Optimizer, name, getattr(Optimizer, name).__wrapped__)
    for kind in (torch.optim.Adam, torch.optim.SGD):
        yield Redirect(kind, "step", _step_without_compiler(inspect.unwrap(kind.step)))


def _step_without_compiler(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step as `torch.optim.optimizer._use_grad_for_differentiable` does, without the compiler."""

    @functools.wraps(step)
    def computed(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return computed


# --- the compiler -----------------------------------------------------------------------------------------------------


def _leave_as_it_is(model: Any = None, **options: Any) -> Any:
    """Stand for `torch.compile`: moe/router.py:918 (0.19) compiles a method of an inference router while it is imported, which
    imports the compiler: 1.8 of the 4.4 CPU seconds that importing a rank took."""
    return (lambda function: function) if model is None else model


# --- names inside megatron --------------------------------------------------------------------------------------------


def _expect_no_gpu_packages() -> None:
    # Without a GPU neither can run, also where it is installed: optimizer/__init__.py:13-24 would take its fused Adam, and an
    # import that fails for want of a driver is no ImportError. None in sys.modules makes each import one.
    for package in ("transformer_engine", "apex"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    # Five modules of megatron warn, as they are imported, that both are absent.
    for message in ("Apex is not installed", "Transformer Engine and Apex are not installed"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    # random.py:17 (0.19) imports what warns where a CUDA toolkit is installed and no GPU: a login node, a machine that builds.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_about_a_missing_gpu)


def _is_not_about_a_missing_gpu(record: logging.LogRecord) -> bool:
    return not record.msg.startswith("No CUDA runtime is found")


def _do_not_compile(jit: Any) -> None:
    # jit.py:28 decorates small functions with torch.compile, which on a CPU starts a C++ compiler in every process.
    jit.disable_jit_fuser()


def _dispatch_experts_on_cpu(moe_utils: Any) -> None:
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # moe_utils.py:1093 turns split sizes into numpy only for CUDA tensors; all-to-all wants plain numbers.
    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    # moe_utils.py:1192: where Transformer Engine is half importable this is a mock or undefined; None selects torch.mm.
    moe_utils.te_general_gemm = None


def _scale_in_place(clip_grads: Any) -> None:
    def scale(chunk_size: int, noop: Any, tensor_lists: list[list[torch.Tensor]], factor: float) -> None:
        for source, target in zip(*tensor_lists, strict=True):
            torch.mul(source, factor, out=target)

    # utils.py:1212 makes a tensor of products first, of the size of each gradient, and copies it.
    clip_grads.multi_tensor_scale_impl = scale


def _share_one_generator(random: Any) -> None:
    # random.py:265 warns whenever the CPU generator moves inside a "CUDA" fork. Here they are one generator, so it always
    # does, and fork() restores it on exit: the warning would be printed for every dropout and say nothing.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _add_weight_gradients(layers: Any) -> None:
    def add(inputs: torch.Tensor, of_outputs: torch.Tensor, total: torch.Tensor) -> None:
        if inputs.dtype == total.dtype:
            total.addmm_(of_outputs.t(), inputs)
        else:
            total.add_(of_outputs.t() @ inputs)

    # layers.py:569: apex's kernels, with which a layer adds its weight gradient to the buffer that all are summed in.
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
