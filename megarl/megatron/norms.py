"""RMSNorms on plain torch: over the residual stream, a head or a latent, and over all heads of a projection together."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ReferenceRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, marking its weight so that megatron-core sums its gradient under SP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.is_zero_centred = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., H]` to `[..., H]`; the statistics are float32 or better, and so is the sum of a zero-centred weight and 1."""
        if not self.is_zero_centred:
            return rms_norm(hidden, self.weight, self.eps)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        return rms_norm(hidden.to(exact), 1.0 + self.weight.to(exact), self.eps).to(hidden.dtype)


class UnitNorm(torch.nn.Module):
    """Division of a head by its root mean square, without a weight; megatron-core builds it as it does a norm of heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., d]` to `[..., d]`; the statistics are float32 or better."""
        exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)).to(hidden.dtype)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden` `[..., H]` over its root mean square, times `weight` `[H]`; on a CPU torch makes a dozen passes of it."""
    if hidden.device.type != "cpu":
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), weight, eps)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    return _RMSNorm.apply(hidden.to(exact), weight.to(exact), eps).to(hidden.dtype)


class _RMSNorm(torch.autograd.Function):
    """Keeps the normed input and one number per token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = hidden.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = hidden * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        of_weights = (grads[0] * normed).flatten(0, -2)
        along = (of_weights @ weight).view(scale.shape).div_(len(weight))  # what a token's outputs ask of its scale
        of_input = torch.addcmul(grads[0] * weight, normed, along, value=-1).mul_(scale)
        return of_input, of_weights.sum(0), None


class LateNorm(ReferenceRMSNorm):
    """The norm of each query or key head in a family that norms behind the rotation (Hunyuan).

    megatron-core's attention calls it before, and gets back what it gave; `norm_behind_rotary` has it called again.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., d]`, unchanged."""
        return hidden

    def late(self, hidden: Tensor) -> Tensor:
        """`[..., d]`, rotated, to the same, normed."""
        return super().forward(hidden)


def norm_behind_rotary(model: torch.nn.Module) -> None:
    """Have every core attention whose layer has `LateNorm`s norm the queries and keys that it is given, which are rotated."""
    for module in model.modules():
        norms: Any = getattr(module, "q_layernorm", None), getattr(module, "k_layernorm", None)
        core: Any = getattr(module, "core_attention", None)
        if isinstance(norms[0], LateNorm):
            core.register_forward_pre_hook(partial(_norm_first_two, norms))


def _norm_first_two(norms: tuple[LateNorm, LateNorm], module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    query, key, *rest = inputs
    return norms[0].late(query), norms[1].late(key), *rest


class ProjectionNorm(torch.nn.Module):
    """RMSNorm over all heads of a projection together (OLMo 2), of which tensor ranks hold a share each.

    The weight is whole on every rank; megatron-core sums the gradients of what is called `q_layernorm` and `k_layernorm` over
    tensor parallelism. With fewer KV heads than ranks several ranks hold the same head.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps = heads, head_dim, eps
        self.weight = torch.nn.Parameter(torch.ones(heads * head_dim, dtype=dtype))

    def forward(self, projected: Tensor) -> Tensor:
        """This rank's heads `[S, B, heads held, d]`, to the same; the statistics are float32 or better."""
        group, local_heads = parallel_state.get_tensor_model_parallel_group(), projected.shape[-2]
        copies = local_heads * group.size() // self.heads
        first = group.rank() * self.heads // group.size()
        weight = self.weight.view(self.heads, self.head_dim)[first : first + local_heads]
        return _OverAllHeads.apply(projected, weight, self.eps, self.heads * self.head_dim, copies, group)


class QueryNorm(ProjectionNorm):
    """Over the heads of all queries; megatron-core builds it as it does a norm of each head."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(config.num_attention_heads, hidden_size, eps, config.params_dtype)


class KeyNorm(ProjectionNorm):
    """Over the heads of all keys."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        assert config.num_query_groups is not None
        super().__init__(config.num_query_groups, hidden_size, eps, config.params_dtype)


class _OverAllHeads(torch.autograd.Function):
    """`width` elements of a token are normed together; `copies` ranks hold each. Keeps the input and one number per token."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, eps: float, width: int, copies: int, group: torch.distributed.ProcessGroup
    ) -> Tensor:
        exact = projected.to(torch.promote_types(projected.dtype, torch.float32))
        squares = exact.square().sum((-2, -1), keepdim=True)
        if group.size() > 1:
            torch.distributed.all_reduce(squares, group=group)
        scale = torch.rsqrt(squares / (copies * width) + eps)
        ctx.save_for_backward(projected, weight, scale)
        ctx.width, ctx.copies, ctx.group = width, copies, group
        return (exact * scale * weight).to(projected.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        projected, weight, scale = ctx.saved_tensors
        grad, normed = grads[0].to(scale.dtype), projected.to(scale.dtype) * scale
        of_weight = (grad * normed).sum((0, 1)).to(weight.dtype)
        grad = grad * weight
        along = (grad * normed).sum((-2, -1), keepdim=True)  # what all ranks' outputs ask of the common scale
        if ctx.group.size() > 1:
            torch.distributed.all_reduce(along, group=ctx.group)
        of_input = scale * (grad - normed * along / (ctx.copies * ctx.width))
        return of_input.to(projected.dtype), of_weight, None, None, None, None
