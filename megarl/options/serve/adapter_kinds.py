"""Kinds of layers beside which a model may have adapters, as clients choose them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.models.adapters import LORA_A, LORA_B
from megarl.options.serve.values import AdapterChoice


@dataclass(frozen=True)
class Facts:
    """Facts of a role: adapters have at most `largest_rank` (None: all weights are trained), beside `kinds` of layers."""

    largest_rank: int | None
    kinds: frozenset[str] = frozenset()


def kind_of(tensor: str) -> str:
    """The kind of layer that a tensor of an adapter, by the hub's name, is beside: `attn`, `mlp`, or `unembed`, the output."""
    layer = tensor.removesuffix(LORA_A).removesuffix(LORA_B)
    if layer.rpartition(".")[2] in ("lm_head", "embed_out", "output_layer"):
        return "unembed"
    return "attn" if "attn" in layer or "attention" in layer else "mlp"


def is_chosen(kind: str, choice: AdapterChoice) -> bool:
    """Return whether a model has adapters beside layers of this kind."""
    return {"attn": choice.train_attn, "mlp": choice.train_mlp, "unembed": choice.train_unembed}[kind]
