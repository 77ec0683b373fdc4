"""Gemma 4's layer: norms behind both branches, a branch for the layer's own inputs, and a number that multiplies the result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.branches import BranchLayer
from megarl.megatron.latent_attention import ReplicatedLinear
from megarl.megatron.norms import ReferenceRMSNorm
from megarl.options.gemma4.sizes import OwnKind


class Gemma4Layer(BranchLayer):
    """A layer of this `kind`, with inputs of width `inputs` (0: none). `kept` is what its attention keeps for later layers."""

    read_input: Callable[[], Tensor]
    """The layer's input `[S, 1, inputs]`, of the tokens that it is given; set where the chunk is built."""
    layer_scalar: Tensor

    def __init__(
        self, config: TransformerConfig, *args: Any, kind: OwnKind, kept: dict[int, Any], inputs: int, **kwargs: Any
    ) -> None:
        if kind.wide:
            config = copy.copy(config)
            config.ffn_hidden_size = 2 * (config.ffn_hidden_size or 0)
        super().__init__(config, *args, **kwargs)
        self.kind, self.kept, self.has_input = kind, kept, inputs > 0
        self.recomputes = config.recompute_granularity == "full"
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))
        if inputs:
            self.input_gate = ReplicatedLinear(config.hidden_size, inputs, config)
            self.input_projection = ReplicatedLinear(inputs, config.hidden_size, config)
            self.post_input_layernorm = ReferenceRMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as megatron-core does; with full recomputation, nothing of it is kept but what it is given."""
        given = self.read_input() if self.has_input else None
        taken = self.kept[self.kind.takes] if self.kind.takes is not None else (None, None)
        if not (self.recomputes and self.training):
            return self._run(hidden_states, given, *args, **kwargs), None

        def run(hidden: Tensor, given: Tensor | None, key: Tensor | None, value: Tensor | None) -> Any:
            if self.kind.takes is not None:
                self.kept[self.kind.takes] = key, value
            found = self._run(hidden, given, *args, **kwargs)
            return (found, *self.kept[self.layer_number - 1]) if self.kind.is_taken else found

        found = tensor_parallel.checkpoint(run, False, hidden_states, given, *taken)
        if self.kind.takes is not None:
            self.kept[self.kind.takes] = taken
        if self.kind.is_taken:
            found, *keys_and_values = found
            self.kept[self.layer_number - 1] = tuple(keys_and_values)
        return found, None

    def _run(self, hidden_states: Tensor, given: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        hidden, _ = super().forward(hidden_states, *args, **kwargs)
        if given is not None:
            branch = self.input_projection(self.config.activation_func(self.input_gate(hidden)) * given)
            hidden = hidden + self.post_input_layernorm(branch)
        return hidden * self.layer_scalar
