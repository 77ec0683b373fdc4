"""Parts that SGLang 0.5.23 has on CUDA only, for a CPU: expert parallelism, DP attention, the plain rope of DeepSeek-V3,
several
ranks that hold the same KV head, and the choices of experts that are kept beside the KV cache."""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Replace SGLang's functions; call it before a model is built."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.model_executor import model_runner

    model_runner.adjust_config_with_unaligned_cpu_tp = sharing_kv_heads(model_runner.adjust_config_with_unaligned_cpu_tp)
    of_cpu = factory.get_rope_cpu  # knows DeepSeek's yarn alone
    factory.get_rope_cpu = lambda *sizes: factory.get_rope(*sizes[:8]) if sizes[5] is None else of_cpu(*sizes)
    fused_moe_native.moe_forward_native = own_experts_only(fused_moe_native.moe_forward_native)
    # to register memory with CUDA is all that the other function does beside
    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, **pinned: torch.empty(dims, dtype=dtype)
    # the other way needs NCCL
    GroupCoordinator.reduce_scatterv = GroupCoordinator._deterministic_reduce_scatterv


def sharing_kv_heads(adjust: Any) -> Any:
    """`adjust_config_with_unaligned_cpu_tp`, which gives each rank a KV head of its own, and the model more heads than it has.

    Where each KV head can be that of a whole number of ranks the heads stay as they are, as on CUDA.
    """

    def adjusted(model_config: Any, load_config: Any, tp_size: int) -> Any:
        heads, kv_heads = model_config.num_attention_heads, model_config.get_total_num_kv_heads()
        adjust(model_config, load_config, tp_size)
        if heads % tp_size == 0 and tp_size % kv_heads == 0:
            for config in (model_config, model_config.hf_config, model_config.hf_text_config):
                config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
        return model_config

    return adjusted


def own_experts_only(moe: Any) -> Any:
    """`moe_forward_native` for ranks that have some of the experts: another rank's have the number -1 and add nothing."""

    def forward(layer: Any, x: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
        token, choice = (chosen.topk_ids >= 0).nonzero(as_tuple=True)
        if len(token) == chosen.topk_ids.numel():
            return moe(layer, x, chosen, config)  # type: ignore[no-any-return]
        output = torch.zeros_like(x)
        if len(token):
            ids, weights = chosen.topk_ids[token, choice, None], chosen.topk_weights[token, choice, None]
            output.index_add_(0, token, moe(layer, x[token], chosen._replace(topk_ids=ids, topk_weights=weights), config))
        return output

    return forward
