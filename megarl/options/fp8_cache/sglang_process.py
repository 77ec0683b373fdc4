"""Scales of keys and values in FP8 in SGLang's servers (0.5.23), installed in each of a server's processes.

SGLang has a file of scales for this, from which it takes a number to divide by as it writes; what it multiplies by as it reads
(`k_scale_float`) stays None, and its kernels for Hopper ask a number for `expand`. Without the file all scales are 1. Here an
attention gets both, in the forms that a checkpoint with scales would give it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megarl.models.packings import FP8_BLOCK
from megarl.options.fp8_cache.checks import BACKENDS
from megarl.options.fp8_cache.scales import key_bound, row_bound, scale_for
from megarl.options.fp8_cache.section import MARK


def install(arguments: list[str]) -> None:
    """Give the model's attention its scales when it is loaded, if the server is one of `rollout.kv_cache_dtype`.

    SGLang's own choice of kernels rounds queries to FP8 on Hopper, without a scale: it is FlashInfer's here.
    """
    mark = f"--{MARK.replace('_', '-')}"
    if mark not in arguments:
        return
    arguments.remove(mark)
    if "--attention-backend" not in arguments:
        arguments += ["--attention-backend", BACKENDS[0]]
    from sglang.srt.model_executor import model_runner

    model_runner.load_kv_cache_scales = lambda *, model, kv_cache_dtype: set_scales(model)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _allow_on_cpu()


def _allow_on_cpu() -> None:
    """Let SGLang's torch backend have such a cache on any CPU: it asks for Intel's AMX, and for the backend of that."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import kv_cache_configurator

    kv_cache_configurator.cpu_has_amx_support = lambda: True
    kv_cache_configurator.attention_backends = lambda: ("intel_amx",)
    kv_cache_configurator.KVCacheConfigurator._build_mha_quant_method = lambda self, *, num_layers: None
    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, _with_scales(getattr(TorchNativeAttnBackend, name)))


def set_scales(model: torch.nn.Module) -> None:
    """Set the scales of every attention of a loaded SGLang model, the same on all ranks of an engine.

    Raises:
        ValueError: the model has no attention whose weights it knows.
    """
    modules: Iterable[Any] = model.modules()
    layers = [module for module in modules if hasattr(module, "input_layernorm") and hasattr(module, "self_attn")]
    if not layers:
        raise ValueError("no layer of the model has an input_layernorm and a self_attn, whose weights bound keys and values")
    bounds = _largest_of_ranks(torch.tensor([_bounds(layer.self_attn, layer.input_layernorm.weight) for layer in layers]))
    for layer, scales in zip(layers, bounds.tolist(), strict=True):
        attention = layer.self_attn.attn
        for name, bound in zip(("k_scale", "v_scale"), scales, strict=True):
            scale = scale_for(bound)
            if isinstance(getattr(attention, name), Tensor):  # a parameter of checkpoints with scales
                getattr(attention, name).data.fill_(scale)
            else:
                setattr(attention, name, torch.tensor(scale, device=layer.input_layernorm.weight.device))
            setattr(attention, f"{name}_float", scale)


def _bounds(attention: Any, norm: Tensor) -> tuple[float, float]:
    """The largest key and value of a rank's heads."""
    layer, queries, keys = attention.qkv_proj, attention.q_size, attention.kv_size
    weight, bias, key_norm = _weight(layer), layer.bias, getattr(attention, "k_norm", None)
    of_keys, of_values = slice(queries, queries + keys), slice(queries + keys, queries + 2 * keys)
    return (
        key_bound(
            weight[of_keys],
            norm,
            bias[of_keys] if bias is not None else None,
            key_norm.weight if key_norm is not None else None,
            float(getattr(attention.rotary_emb, "mscale", 1.0)),
        ),
        row_bound(weight[of_values], norm, bias[of_values] if bias is not None else None),
    )


def _weight(layer: Any) -> Tensor:
    """The weights `[R, C]` of a linear layer, as numbers; those in FP8 have a scale for each block."""
    scales = getattr(layer, "weight_scale_inv", None)
    if scales is None:
        return layer.weight  # type: ignore[no-any-return]
    rows, cols = layer.weight.shape
    spread = scales.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :cols]
    return layer.weight.float() * spread


def _largest_of_ranks(bounds: Tensor) -> Tensor:
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bounds


def _with_scales(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A pass of SGLang's torch backend, which leaves scales out: of powers of two, queries may have those of the keys."""

    def scaled(self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **others: Any) -> Tensor:
        of_keys, of_values = layer.k_scale_float, layer.v_scale_float
        if of_keys is None:
            return forward(self, q, k, v, layer, *args, **others)
        return forward(self, q * of_keys, k / of_keys, v / of_values, layer, *args, **others) * of_values

    return scaled
