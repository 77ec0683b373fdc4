"""What SGLang's servers lack for adapters that change while requests are under way; installed in each of their processes.

A server has one place for adapters, made once through SGLang's own endpoint (`megarl.options.lora.adapter_place`), and every
update writes into it, so that requests which are held meanwhile go on under the new version. For SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megarl.models.adapters import served_name
from megarl.options.lora.adapter_place import ADAPTERS, remember
from megarl.options.lora.cpu_products import times_a, times_b


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
    """Have SGLang's PyTorch backend of adapters do without pinned memory, which torch has beside an accelerator only, and
    multiply the rows of a batch by adapters."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment, method-assign]
    for module in (layers, torch_backend):
        module.torch = _Unpinned()
    _route_rows_of_output_layer(torch_backend)
    torch_backend.sgemm_lora_a_fwd, torch_backend.sgemm_lora_b_fwd = times_a, times_b


def _route_rows_of_output_layer(torch_backend: Any) -> None:
    """Have the PyTorch backend multiply the output layer's rows by the adapters of their requests.

    The layer is given some of a batch's rows, perhaps in several passes; the backend takes them for the batch's first ones.
    """
    from sglang.srt.lora.utils import get_lm_head_pruned_lens, merge_and_chunk_segments

    backend = torch_backend.TorchNativeLoRABackend
    prepare = backend.prepare_lora_batch

    def prepare_with_rows(self: Any, forward_batch: Any, weight_indices: list[int], *args: Any, **given: Any) -> None:
        prepare(self, forward_batch, weight_indices, *args, **given)
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = None
        if (rows := get_lm_head_pruned_lens(forward_batch)) is None:
            return
        whole = merge_and_chunk_segments(weight_indices, rows, max(1, sum(rows)))
        self.lm_head_batch_info = _of_segments(self.batch_info, *whole)
        passes = self._get_lm_head_pass_segments(weight_indices, rows)
        if passes is not None:
            self.lm_head_pass_batch_infos = [_of_segments(self.batch_info, *segments) for segments in passes]

    def run(product: Any) -> Any:
        def by_rows(self: Any, x: Tensor, weights: Tensor, *args: Any, pruned_batch_info: Any = None, **given: Any) -> Tensor:
            whole = self.batch_info
            try:
                self.batch_info = pruned_batch_info if pruned_batch_info is not None else whole
                added: Tensor = product(self, x, weights, *args, **given)
                return added
            finally:
                self.batch_info = whole

        return by_rows

    backend.prepare_lora_batch = prepare_with_rows
    backend.run_lora_a_sgemm, backend.run_lora_b_sgemm = run(backend.run_lora_a_sgemm), run(backend.run_lora_b_sgemm)


def _of_segments(info: Any, weight_indices: list[int], lengths: list[int]) -> Any:
    """A batch's information for other rows: by segment which adapters they have, and how many there are."""
    return replace(
        info,
        weight_indices_cpu=torch.tensor(weight_indices, dtype=torch.int32),
        seg_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
        expected_tokens=sum(lengths),
    )


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
