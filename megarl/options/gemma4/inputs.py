"""Inputs that every layer of a small Gemma 4 model has for each token: rows of a table, and a projection of the embedding."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megarl.megatron.latent_attention import ReplicatedLinear
from megarl.megatron.norms import ReferenceRMSNorm
from megarl.models.packings import padded_vocab
from megarl.options.gemma4.sizes import Gemma4Layers


class LayerInputs(torch.nn.Module):
    """Inputs of all layers, for the tokens that were last embedded; the table is split over tensor ranks as embeddings are."""

    def __init__(self, config: TransformerConfig, own: Gemma4Layers, *, scatters: bool) -> None:
        super().__init__()
        self.layers, self.width, self.scatters = len(own.kinds), own.inputs, scatters
        rows = padded_vocab(own.vocabulary, parallel_state.get_tensor_model_parallel_world_size())
        self.table = VocabParallelEmbedding(
            rows,
            self.layers * self.width,
            init_method=torch.nn.init.zeros_,
            reduce_scatter_embeddings=scatters,
            config=config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        self.projection = ReplicatedLinear(config.hidden_size, self.layers * self.width, config)
        self.norm = ReferenceRMSNorm(config, self.width, config.layernorm_epsilon)
        self.scale = torch.tensor(self.width**0.5, dtype=config.params_dtype, device="cpu").item()
        self.of_embedding = config.hidden_size**-0.5
        self.current: Tensor | None = None

    def compute(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], embedded: Tensor) -> None:
        """A forward hook of the embedding: make the inputs `[S, 1, layers, width]` of its tokens `[1, S]`."""
        of_tokens = self.table(kwargs["input_ids"] if "input_ids" in kwargs else args[0])
        of_tokens = of_tokens if self.scatters else of_tokens.transpose(0, 1)
        projected = (self.projection(embedded) * self.of_embedding).unflatten(-1, (self.layers, self.width))
        self.current = (self.norm(projected) + of_tokens.unflatten(-1, (self.layers, self.width)) * self.scale) * 2.0**-0.5

    def of_layer(self, layer: int) -> Tensor:
        """`[S, 1, width]`, of a layer counted from 0."""
        assert self.current is not None, "no tokens were embedded"
        return self.current[:, :, layer]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The table, split as embeddings are, and the rest, whole on every tensor rank."""
        entries: dict[str, Any] = {}
        group = parallel_state.get_tensor_model_parallel_group()
        for name, module in self.named_children():
            entries |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        return entries
