"""Training of indexers in the passes of a role's model: over how many tokens their losses are means, and what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.data.stream import MicroBatch, PackedStream, StreamShard
from megarl.data.stream_sequences import token_sequences
from megarl.megatron.options import ModelOptions
from megarl.megatron.pass_parts import PassPart
from megarl.options.sparse_attention.attention import IndexedAttention


class IndexerTraining(PassPart):
    """The indexers of a role's model chunks on this rank."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        modules = [module for chunk in chunks for module in chunk.modules()]
        self._layers = [module for module in modules if isinstance(module, IndexedAttention) and module.has_indexer]
        self._passes = 0

    def joins(self, *, training: bool) -> bool:
        return training

    def lay(self, units: MicroBatch, stream: PackedStream, share: StreamShard, device: torch.device) -> float:
        """Tokens of a micro-batch, each once for each sequence that it is in."""
        return float(token_sequences(stream).lengths.sum())

    def begin(self, streams: Sequence[tuple[PackedStream, StreamShard]], given: Sequence[float]) -> None:
        tokens = torch.tensor(sum(given), device=torch.cuda.current_device())
        torch.distributed.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        for layer in self._layers:
            layer.batch_tokens = max(float(tokens), 1.0)
        self._passes += 1

    def take_losses(self) -> tuple[dict[int, float], int]:
        """The losses by layer, and passes, since the last call; the first tensor rank speaks for the others."""
        losses = {layer.chooser: float(sum(layer.losses)) for layer in self._layers if layer.losses}
        for layer in self._layers:
            layer.losses.clear()
        passes, self._passes = self._passes, 0
        speaks = parallel_state.get_tensor_model_parallel_rank() == 0
        return losses if speaks else {}, passes


def take_part(chunks: Sequence[Any], options: ModelOptions) -> IndexerTraining | None:
    """The part of a role that trains indexers."""
    return IndexerTraining(chunks) if options.variant else None
