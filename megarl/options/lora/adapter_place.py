"""The place in which an SGLang server holds the adapters of a run: one place in its memory for adapters, in every rank.

The engine has SGLang make the place (`/load_lora_adapter_from_tensors`, with adapters that are all zero, pinned so that it is
never given to others); updates write into it as into parameters, and read it back. For SGLang 0.5.23 (lora/mem_pool.py,
lora/layers.py), of which nothing is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megarl.models.adapters import LORA_A, LORA_B
from megarl.options.lora.section import OUTPUT
from megarl.options.lora.weight_map import Lora

ADAPTERS = "policy"
"""The server's name of its adapters, whatever their version."""
_MANAGER = "megarl_adapters"


def making_place(lora: Lora, ranks: int, nothing: str) -> dict[str, Any]:
    """The body of the request that makes the place; `nothing` is an empty dictionary as SGLang reads tensors."""
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,  # SGLang divides by the rank, whatever the scale is
        "target_modules": "all-linear",
    }
    return {"lora_name": ADAPTERS, "config_dict": config, "serialized_named_tensors": [nothing] * ranks, "pinned": True}


def remember(model: Any, manager: Any) -> None:
    """Have `tensors_of(model)` find what SGLang's `manager` of adapters holds."""
    setattr(model, _MANAGER, manager)


def tensors_of(model: Any) -> Mapping[str, Tensor]:
    """By engine name A `[n·rank, in]` and B `[out, rank]` of each of a rank's layers, as views; none without a manager.

    A layer that is fused of n others has their As one below another, and their Bs, too.
    """
    manager = getattr(model, _MANAGER, None)
    return dict(_tensors(manager)) if manager is not None else {}


def _tensors(manager: Any) -> Iterator[tuple[str, Tensor]]:
    names = {reference.lora_name: uid for uid, reference in manager.lora_refs.items()}
    if ADAPTERS not in names:
        return
    uid = names[ADAPTERS]
    if uid not in manager.memory_pool.uid_to_buffer_id:
        manager.fetch_new_loras({uid})
    slot = manager.memory_pool.uid_to_buffer_id[uid]
    if (output := manager.lm_head_module) is not None:
        yield OUTPUT + LORA_A, output.lm_head_A_buffer[slot]
        yield OUTPUT + LORA_B, output.lm_head_B_buffer[slot]
    for modules in manager.lora_modules:
        for name, module in modules.items():
            yield name + LORA_A, module.lora_a[slot]
            yield name + LORA_B, module.lora_b[slot]
