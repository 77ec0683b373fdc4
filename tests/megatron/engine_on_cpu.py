"""Transformer Engine's own layers and Adam in a process without a GPU, which they are told to have; no layer computes anything.

Import this before megarl's platform is installed: for want of a GPU that hides Transformer Engine. `World(first=…)` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch  # first: it brings the libraries that Transformer Engine looks for
import transformer_engine.pytorch  # noqa: F401
import transformer_engine_torch
from torch import Tensor

HOPPER, BLACKWELL = (9, 0), (10, 0)


@contextmanager
def a_gpu(capability: tuple[int, int] = HOPPER) -> Iterator[None]:
    """Inside, torch says that there is a GPU of this compute capability; megarl's platform stays that of a CPU."""
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    major, minor = capability
    answers: dict[str, Any] = {
        "is_available": True,
        "get_device_capability": capability,
        "get_device_properties": SimpleNamespace(major=major, minor=minor, multi_processor_count=132, total_memory=80 << 30),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *unused, answer=answer, **also_unused: answer)
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            patch.setenv(name, "forgotten afterwards")  # megatron-core writes its choice of attention into the environment
            patch.delenv(name)
        patch.setattr(torch, "arange", _on_cpu(torch.arange))
        patch.setattr(torch, "full", _on_cpu(torch.full))
        patch.setattr(multi_latent_attention, "HAVE_TE", True)  # megarl's platform for a CPU says that there is none
        patch.setattr(transformer_engine_torch, "multi_tensor_adam", adam)
        patch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
        patch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", local_multi_tensor_scale)
        for module in (clip_grads, optimizer):
            patch.setattr(module, "multi_tensor_scale_impl", local_multi_tensor_scale)
        yield


def _on_cpu(factory: Any) -> Any:
    return lambda *sizes, device=None, **settings: factory(*sizes, **settings)


def adam(
    chunk_size: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], lr: float, beta1: float, beta2: float, eps: float,
    step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Stands for Transformer Engine's kernel: one step of AdamW on lists of gradients, float32 weights and both moments."""
    assert mode == bias_correction == 1
    for gradient, weight, first, second in zip(*tensors, strict=True):
        first.lerp_(gradient, 1 - beta1)
        second.lerp_(gradient.square(), 1 - beta2)
        scale = (second / (1 - beta2**step)).sqrt() + eps
        weight.sub_(lr * (first / (1 - beta1**step) / scale + weight_decay * weight))
