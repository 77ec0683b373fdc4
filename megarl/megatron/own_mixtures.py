"""Mixtures of experts in the place of megatron-core's own: what families of options change of it is a class of theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


class OwnMixture(MoELayer):
    """megatron-core's layer of the `parts` that its class has, so that both versions of megatron-core build it alike."""

    parts: Any

    def __init__(
        self, config: TransformerConfig, layer_number: int | None = None, pg_collection: Any = None, **more: Any
    ) -> None:
        named = {"name": more["name"]} if more.get("name") is not None else {}
        super().__init__(config, self.parts, layer_number, pg_collection, **named)


def parts_of(mixture: Any) -> Any:
    """The submodules that the spec `mixture` of a mixture has."""
    return mixture.keywords["submodules"] if isinstance(mixture, partial) else mixture.submodules
