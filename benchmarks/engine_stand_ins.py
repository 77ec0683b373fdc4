"""Stands for the kernels of Transformer Engine on a machine without a GPU, so that a pass through its layers can be counted.

Import this before megarl's platform is installed. All Python of megatron-core and Transformer Engine is the real one; what it
calls in `transformer_engine_torch`, in Triton and in compiled functions is replaced by functions that answer with tensors of
the right shape and type. Values are zeros, but where later calls depend on them (which experts a token has).
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformer_engine.pytorch  # noqa: F401
import transformer_engine_torch as tex
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformer_engine.pytorch import cpp_extensions
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.triton import permutation

from benchmarks.launches import in_main_memory, standing_for, waited
from tests.megatron.engine_on_cpu import a_gpu

TORCH_TYPES = {int(of_engine): dtype for dtype, of_engine in TE_DType.items()}


class Kernels(NamedTuple):
    """What stands for a function: `answer` has its arguments and results, `count` says how many kernels a call starts on a GPU,
    `flops`, given the result and the arguments, how many operations of products are in them."""

    answer: Callable[..., Any]
    count: int | Callable[..., int]
    flops: Callable[..., int] | None = None


# --- products ---------------------------------------------------------------------------------------------------------


def gemm(a: Tensor, trans_a: Any, b: Tensor, trans_b: Any, out: Tensor | None, *rest: Any, **unused: Any) -> list[Any]:
    """`b` or its transpose times `a` or its transpose, as rows are stored; the bias' gradient, if there is one, beside it."""
    _, out_type, bias, _, _, _, is_gradient = rest[:7]
    if out is None:
        width = a.shape[0] if trans_a else a.shape[-1]
        shape = (b.shape[-1], width) if trans_b else (*b.shape[:-1], width)
        out = torch.zeros(shape, dtype=b.dtype if out_type is None else TORCH_TYPES[int(out_type)])
    return [out, torch.zeros_like(bias) if is_gradient and bias is not None else None, None, None]


def gemm_flops(result: Any, a: Tensor, trans_a: Any, b: Tensor, *unused: Any, **also_unused: Any) -> int:
    """Twice the multiplications."""
    return 2 * b.numel() * (a.shape[0] if trans_a else a.shape[-1])


def grouped_gemm(a: Sequence[Tensor], trans_a: Any, b: Sequence[Tensor], trans_b: Any, out: Any, *rest: Any) -> Any:
    """Into `out`; the gradients of biases, which were there before."""
    return rest[2]


def experts_with_tokens(a: Sequence[Tensor], trans_a: Any, b: Sequence[Tensor], *unused: Any) -> int:
    """One product for each, on one of four streams."""
    return sum(1 for tokens in b if tokens.numel())


def grouped_flops(result: Any, a: Sequence[Tensor], trans_a: Any, b: Sequence[Tensor], *unused: Any) -> int:
    """Of all experts."""
    return sum(gemm_flops(None, of_a, trans_a, of_b) for of_a, of_b in zip(a, b, strict=True))


# --- norms and positions ----------------------------------------------------------------------------------------------


def norm(hidden: Tensor, weight: Tensor, eps: float, out: Tensor | None, *unused: Any) -> list[Any]:
    """The normed tokens, no mean, and the inverse of each token's root mean square."""
    rows = hidden.numel() // hidden.shape[-1]
    return [torch.zeros_like(hidden) if out is None else out, None, torch.ones(rows, dtype=torch.float32)]


def norm_backward(gradient: Tensor, hidden: Tensor, inverse: Tensor, weight: Tensor, *unused: Any) -> list[Tensor]:
    """Gradients of tokens and weight."""
    return [torch.zeros_like(hidden), torch.zeros_like(weight)]


def rotated(tokens: Tensor, *unused: Any) -> Tensor:
    """Packed anew, as the kernel does it."""
    return torch.zeros(tokens.shape, dtype=tokens.dtype)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(*given: Any) -> list[Tensor]:
    """Output, the log of the sums of exponentials, and the state of random numbers."""
    query, value = given[16], given[18]
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    return [out, torch.zeros(*query.shape[:-1], 1, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)]


def attention_backward(*given: Any) -> list[Any]:
    """Gradients of query, key and value."""
    return [*(torch.zeros_like(given[place]) for place in (19, 20, 21)), None, None]


def attention_flops(result: Any, *given: Any) -> int:
    """Two products over the pairs of tokens that see each other."""
    query, value = given[16], given[18]
    return 2 * _pairs(given[14]) * query.shape[-2] * (query.shape[-1] + value.shape[-1])


def attention_backward_flops(result: Any, *given: Any) -> int:
    """Five products: the scores once more, and the gradients of scores, query, key and value."""
    query, value = given[19], given[21]
    return 2 * _pairs(given[17]) * query.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _pairs(ends: Tensor) -> int:
    lengths = ends.diff().double()
    return int((lengths * (lengths + 1)).sum().item() / 2)


# --- routing ----------------------------------------------------------------------------------------------------------


def top_experts(logits: Tensor, top_k: int, *unused: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, which experts a token has, and what the backward pass needs; limits by groups are left out."""
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(top_k, dim=1).indices, value=True)
    return chosen.to(logits.dtype) / top_k, chosen, torch.zeros_like(logits)


def top_experts_backward(chosen: Tensor, kept: Tensor, gradient: Tensor, out: Tensor, *unused: Any) -> None:
    """Into `out`."""
    out.zero_()


class TritonKernel:
    """Takes the place of a kernel in Triton: a launch over any grid writes nothing."""

    def __init__(self, name: str) -> None:
        self._launch = standing_for(1, lambda *arguments, **constants: None, name)

    def __getitem__(self, grid: Any) -> Any:
        return self._launch


def launched_by_head(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
    """A launch of megarl's own kernels for the log-prob head: sums are ones, gradients stay as logits were."""
    standing_for(1, lambda logits, second, *rest: second.fill_(1.0), kernel.__name__)(*arguments)


STAND_INS = {
    "generic_gemm": Kernels(gemm, 1, gemm_flops),
    "te_general_grouped_gemm": Kernels(grouped_gemm, experts_with_tokens, grouped_flops),
    "rmsnorm_fwd": Kernels(norm, 1),
    "rmsnorm_bwd": Kernels(norm_backward, 2),  # the second sums the parts of the weight's gradient
    "fused_rope_forward": Kernels(rotated, 1),
    "fused_rope_backward": Kernels(rotated, 1),
    # The output zeroed, the random state, lengths, offsets; cuDNN: one.
    "fused_attn_fwd": Kernels(attention, 5, attention_flops),
    # Three gradients zeroed, lengths, offsets; cuDNN: sums of rows, gradients, and the query's in its type.
    "fused_attn_bwd": Kernels(attention_backward, 8, attention_backward_flops),
    "fused_topk_with_score_function_fwd": Kernels(top_experts, 1),
    "fused_topk_with_score_function_bwd": Kernels(top_experts_backward, 1),
}
"""Functions of `transformer_engine_torch`. Kernels that it launches itself were counted in its C++ source, but for those that
lay lengths and offsets of attention; these, and how many cuBLAS and cuDNN start for a product or an attention, are assumed."""


class _Compiled(torch.autograd.Function):
    """A function that megatron-core compiles: a kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], structure: Any, *given: Any) -> Tensor:
        """`given` are the leaves of the arguments, which `structure` puts together again."""
        leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in given]
        with torch.enable_grad():
            ctx.found = function(*tree_unflatten(leaves, structure))
        ctx.leaves = [x if isinstance(x, Tensor) and x.requires_grad else None for x in leaves]
        ctx.function = function.__name__
        return ctx.found.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Of the leaves that want one."""
        wanted = [leaf for leaf in ctx.leaves if leaf is not None]
        run = standing_for(1, lambda gradient: torch.autograd.grad(ctx.found, wanted, gradient), f"{ctx.function}, backward")
        found = iter(run(gradients[0]))
        return None, None, *(None if leaf is None else next(found) for leaf in ctx.leaves)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compile` on a GPU makes a function of element by element operations: one kernel."""

    def run(*given: Any, **named: Any) -> Any:
        leaves, structure = tree_flatten(given)
        if torch.is_grad_enabled() and any(x.requires_grad for x in leaves if isinstance(x, Tensor)):
            assert not named, "compiled functions are called by position"
            return standing_for(1, _Compiled.apply, function.__name__)(function, structure, *leaves)
        return standing_for(1, function, function.__name__)(*given, **named)

    return run


def to_host(tensor: Any, as_numpy: Any = False, record_stream: Any = False) -> Any:
    """megatron-core's copy of token counts to main memory, for which it waits later."""
    if not isinstance(tensor, Tensor):
        return tensor
    return tensor.numpy() if as_numpy else in_main_memory(tensor)


@contextmanager
def kernels_stood_for() -> Iterator[None]:
    """Inside, Transformer Engine's layers run on tensors in main memory, which say that they are on a GPU."""
    with ExitStack() as stack:
        stack.enter_context(a_gpu())
        for owner, name, replacement in _replacements():
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def _compiled_functions() -> Iterator[tuple[Any, str, Any]]:
    """Wherever modules of megatron-core hold a function of its fusions that it compiles."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("megatron.core")}
    for name, module in modules.items():
        if not name.startswith("megatron.core.fusions."):
            continue
        for function in _decorated(inspect.getsource(module), "jit_fuser"):
            there = getattr(module, function)
            for owner in (other for other in modules.values() if getattr(other, function, None) is there):
                yield owner, function, compiled(there)


def _decorated(source: str, decorator: str) -> list[str]:
    """Names of a module's functions with this decorator."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if any(ast.unparse(one) == decorator for one in node.decorator_list)]


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    from megarl.megatron import heads, logit_kernels
    from megarl.platform.cpu_redirects import CpuEvent

    owners = [module for name, module in sys.modules.items() if name.startswith("transformer_engine")]
    for name, of in STAND_INS.items():
        there, stand_in = getattr(tex, name), standing_for(of.count, of.answer, name, of.flops)
        for owner in (owner for owner in owners if getattr(owner, name, None) is there):
            yield owner, name, stand_in
    for name in [name for name in vars(permutation) if name.endswith("_kernel")]:
        yield permutation, name, TritonKernel(name.strip("_"))
    yield tex, "get_fused_attn_backend", lambda parameters: (tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "")
    yield cpp_extensions.gemm, "get_cublas_workspace_size_bytes", lambda: 0  # else it would count as bytes of each product
    yield torch.cuda, "is_current_stream_capturing", lambda: False
    yield torch.cuda, "stream", lambda stream: nullcontext()
    yield CpuEvent, "synchronize", lambda event: waited("an event's synchronize")
    yield token_dispatcher, "maybe_move_tensor_to_cpu", to_host
    yield moe_utils, "te_general_gemm", cpp_extensions.general_gemm
    yield from _compiled_functions()
    yield logit_kernels, "_launch", launched_by_head
    yield heads, "row_sums", lambda *given, squares=False: logit_kernels.row_sums_by_kernel(*given, squares=squares)
    yield heads, "logits_to_gradient", logit_kernels.gradient_by_kernel
    yield torch.Tensor, "is_cuda", property(lambda tensor: True)
