"""What SGLang's servers lack for adapters that change while requests are under way; installed in each of their processes.

A server has one place for adapters, made once through SGLang's own endpoint (`megarl.options.lora.adapter_place`), and every
update writes into it, so that requests which are held meanwhile go on under the new version. For SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.models.adapters import served_name
from megarl.options.lora.adapter_place import ADAPTERS, remember


def install() -> None:
    """Replace SGLang's functions; call it before the model is made and requests come."""
    _know_the_place()
    _refuse_other_versions()


def _know_the_place() -> None:
    from sglang.srt.lora.lora_manager import LoRAManager

    make = LoRAManager.__init__

    def making(self: Any, base_model: Any, *args: Any, **given: Any) -> None:
        """The loader is given the model alone."""
        make(self, base_model, *args, **given)
        remember(base_model, self)

    LoRAManager.__init__ = making


def _refuse_other_versions() -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    resolve = TokenizerManager._validate_and_resolve_lora

    async def of_this_version(self: Any, request: Any) -> None:
        """SGLang would answer a request that names no adapters with the model alone."""
        if self.enable_lora and not str(request.rid).startswith(HEALTH_CHECK_RID_PREFIX):
            serves = served_name(self.config_value("weight_version"))
            if request.lora_path != serves:
                requested = "no adapters" if request.lora_path is None else request.lora_path
                raise ValueError(f"the request asks for {requested}, but this server has {serves}")
            request.lora_path = ADAPTERS
        await resolve(self, request)

    TokenizerManager._validate_and_resolve_lora = of_this_version


def allow_on_cpu() -> None:
    """Have SGLang's PyTorch backend of adapters do without pinned memory, which torch has beside an accelerator only."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment, method-assign]
    for module in (layers, torch_backend):
        module.torch = _Unpinned()


def _as_it_is(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor


class _Unpinned:
    """The module torch, whose tensors are not pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *values: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*values, **options)

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)
