"""Tiny models of DeepSeek-V4: windows and rates of compressed keys are a part of what most sequences of the tests have.

Indexers have so many heads that no key's score is zero in all of them: which of equal scores transformers takes is not said.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.families.family import Family

SLIDING, CHOSEN, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
COMPRESSED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 4,
    "o_lora_rank": 6,
    "layer_types": [SLIDING, CHOSEN, HEAVY, CHOSEN],
    "compress_rates": {CHOSEN: 2, HEAVY: 5},
    "sliding_window": 6,
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 2,  # more of them leave so little of a gradient that float32 is off by 1e-5
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "swiglu_limit": 0.4,
    "rope_parameters": YARN,
}
OPTION: dict[str, Any] = {"linear": True, "option": "compressed_attention"}
FAMILIES: dict[str, Family] = {"deepseek_v4": Family("DeepseekV4", COMPRESSED, 8, **OPTION)}
VARIANTS: dict[str, Family] = FAMILIES
ODD: dict[str, Family] = {
    "deepseek_v4-odd": Family(
        "DeepseekV4",
        COMPRESSED
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "o_groups": 3, "n_routed_experts": 6}
        | {"layer_types": [CHOSEN, HEAVY, SLIDING, CHOSEN, CHOSEN], "mlp_layer_types": ["hash_moe", "hash_moe", *["moe"] * 3]},
        6,
        **OPTION,
    ),
}
TABLE = "tid2eid"
"""End of the names of tables of the experts of each token id, on the hub too."""


APART = {4: 9.0, 5: 15.0}
"""By number of layers the size of values that keep streams apart: with others float32 is off by 1.1e-5 in some layout."""


def finish(model: Any, generator: torch.Generator) -> None:
    """Give each token id experts of its own, all different, and hyper-connections such values that streams differ: else the
    norms behind them leave hardly a gradient. What joins outputs to streams is kept from saturating: it alone has gradients
    in the first connection, whose streams are all the same."""
    streams = model.config.hc_mult
    for name, value in model.named_parameters():
        if name.endswith("scale"):
            value.add_(1.0)
        elif name.endswith("base"):
            value.mul_(APART[model.config.num_hidden_layers])
            value[streams : 2 * streams].div_(3.0)
    for name, table in model.named_buffers():
        if name.endswith(TABLE):
            experts = torch.rand(len(table), model.config.n_routed_experts, generator=generator).argsort(-1)
            table.copy_(experts[:, : table.shape[1]])


@contextmanager
def in_float64() -> Iterator[None]:
    """While it lasts, what is float64 stays so, also where transformers computes in float32, whatever a model's dtype is.

    In float32 its gradients of hyper-connections are off by up to 9e-6 of the largest: the norm behind them takes most away.
    """
    tensor: Any = Tensor
    kept = {name: getattr(tensor, name) for name in ("float", "to", "softmax")}

    def to(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        to_float32 = torch.float32 in (*args, kwargs.get("dtype"))
        return values if values.dtype == torch.float64 and to_float32 else kept["to"](values, *args, **kwargs)

    def softmax(values: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return kept["softmax"](values, *args, **kwargs)

    try:
        tensor.to, tensor.softmax, tensor.float = to, softmax, lambda values: to(values, torch.float32)
        yield
    finally:
        for name, method in kept.items():
            setattr(tensor, name, method)


def hub_name(name: str) -> str:
    """What the hub calls a tensor, experts still together; `tests/options/compressed_attention` asks transformers, too."""
    from megarl.options.compressed_attention.deepseek_v4 import hub_name as on_the_hub

    return on_the_hub(name)
