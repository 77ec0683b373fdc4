"""Attention of the SGLang server on a CPU: SGLang's torch backend, with decoding batched instead of looped over requests.

Imported in SGLang's scheduler alone. SGLang's own loop makes one attention call per request and layer, which takes longer
than the arithmetic when many short responses are sampled at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from megarl.rollout.engines.sglang.on_cpu.batched_attention import Gather, attend, attend_with_sinks, gathers


class BatchedTorchBackend(TorchNativeAttnBackend):
    """`torch_native` of SGLang 0.5.23, with decoding in batches, and with sinks, which that one does not have."""

    _sinks: torch.Tensor | None = None
    """Sinks of the layer that is computed."""

    def forward_extend(self, *args: Any, sinks: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        """Attention of tokens of prompts."""
        self._sinks = sinks
        return super().forward_extend(*args, **others)

    def forward_decode(self, *args: Any, sinks: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        """Attention of one more token per request."""
        self._sinks = sinks
        return super().forward_decode(*args, **others)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare one forward pass over all layers."""
        super().init_forward_metadata(forward_batch)
        self._gathers: list[Gather] | None = None

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The length of a request that only fills up a batch: with DP attention, ranks fill up theirs to one length."""
        return 1

    def _run_sdpa_forward_decode(self, *tensors: Any, **options: Any) -> torch.Tensor:
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens = tensors
        if self._sinks is not None:
            caches, tables, ones = (k_cache, v_cache), req_to_token[req_pool_indices], torch.ones_like(seq_lens)
            return self._with_sinks(query, output, caches, tables, seq_lens, ones, options)
        if encoder_lens is not None or options.get("sliding_window_size") is not None:
            return super()._run_sdpa_forward_decode(*tensors, **options)
        if self._gathers is None:
            self._gathers = gathers(req_to_token, req_pool_indices, seq_lens)
        output.copy_(attend(query, k_cache, v_cache, self._gathers, options.get("scaling")))
        return output

    def _run_sdpa_forward_extend(self, *tensors: Any, **options: Any) -> torch.Tensor:
        *of_requests, _, extend_seq_lens, encoder_lens = tensors
        if self._sinks is not None:
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens = of_requests
            caches, tables = (k_cache, v_cache), req_to_token[req_pool_indices]
            return self._with_sinks(query, output, caches, tables, seq_lens, extend_seq_lens, options)
        # samples of a prompt that is cached already begin with an extension by their last token: a decoding step
        if options.get("causal") and bool((extend_seq_lens == 1).all()):
            return self._run_sdpa_forward_decode(*of_requests, encoder_lens, **options | {"causal": False})
        return super()._run_sdpa_forward_extend(*tensors, **options)

    def _with_sinks(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        tables: torch.Tensor,
        lengths: torch.Tensor,
        new: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        assert self._sinks is not None
        scaling, window = options.get("scaling"), options.get("sliding_window_size")
        start = 0
        for slots, length, count in zip(tables, lengths.tolist(), new.tolist(), strict=True):
            keys, values = (cache[slots[:length].long()] for cache in caches)
            stop = start + count
            output[start:stop] = attend_with_sinks(query[start:stop], keys, values, self._sinks, scaling, window)
            start = stop
        return output


@register_attention_backend("torch_native")
def create(runner: Any) -> BatchedTorchBackend:
    """Called by SGLang for `attention_backend="torch_native"` (its memory pools know the CPU path by this name)."""
    if runner.use_mla_backend:
        _attend_to_latents()
    return BatchedTorchBackend(runner)


def allow_sinks() -> None:
    """Have SGLang start a model with sinks (gpt-oss) with this backend: its own, of the same name, has none."""
    from sglang.srt.arg_groups import model_hook

    original = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple(
        "intel_amx" if backend == "torch_native" else backend for backend in original(view)
    )


class _AsTriton:
    """Settings that say `triton` where they say `torch_native`."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return "triton" if name == "attention_backend" and value == "torch_native" else value


def allow_windows() -> None:
    """Have SGLang start Exaone with this backend: it asks for others by name, for windows, which this one knows."""
    from sglang.srt.arg_groups import model_hook

    original = model_hook.resolved_view
    model_hook.resolved_view = lambda server_args: _AsTriton(original(server_args))


def _attend_to_latents() -> None:
    """Have multi-head latent attention (DeepSeek-V3) compute prompts, too, with the latents that the cache holds.

    SGLang would compute a prompt's keys and values for each head, but this backend reads them from the cache.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
