"""The layer for multi-token prediction in the passes of a role's model: with gradients it computes a loss of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.data.stream import MicroBatch, PackedStream, StreamShard, context_parallel_shard
from megarl.megatron import layer_specs
from megarl.megatron.options import ModelOptions
from megarl.megatron.pass_parts import PassPart
from megarl.megatron.step import attention_inputs, laying
from megarl.options.prediction.layer import MTP_LOSS, Prediction, PredictionInputs, prediction_of, share_embedding
from megarl.options.prediction.stream import shifted


class PredictionPart(PassPart):
    """The part of the layer, which a rank of the last stage has."""

    losses = (MTP_LOSS,)

    def __init__(self, chunks: Sequence[Any], options: ModelOptions) -> None:
        self._chunks, self._options, self._layer = chunks, options, prediction_of(chunks)

    def joins(self, *, training: bool) -> bool:
        if training:
            share_embedding(self._chunks)
        return training and self._layer is not None

    def lay(self, units: MicroBatch, stream: PackedStream, share: StreamShard, device: torch.device) -> PredictionInputs:
        """The layer is given its stream as the decoder is given `stream`."""
        options = self._options
        shifted_stream = shifted(units, stream, **laying(options))
        shard = context_parallel_shard(shifted_stream.stream, options.layout.cp, share.rank)
        mask, packed = attention_inputs(shifted_stream.stream, shard, options, (None,), device)
        positions = int(shifted_stream.stream.position_ids.max()) + 1
        return PredictionInputs(shifted_stream.to(device), shard.to(device), share.to(device), mask, packed, positions)

    def begin(self, streams: Sequence[tuple[PackedStream, StreamShard]], given: Sequence[PredictionInputs]) -> None:
        assert self._layer is not None, "a rank without the layer takes no part"
        self._layer.begin([inputs.shifted for inputs in given])

    def forward(self, model: Any, given: PredictionInputs) -> AbstractContextManager[None]:
        if model.post_process:
            model.mtp.request = given
        return nullcontext()

    def loss(self, model: Any) -> tuple[Tensor, dict[str, Any]] | None:
        return model.mtp.take() if model.post_process else None


def take_part(chunks: Sequence[Any], options: ModelOptions) -> PredictionPart | None:
    """The part of a role that trains the layer."""
    return PredictionPart(chunks, options) if options.prediction is not None else None


def add_modules(model: Any, config: TransformerConfig, options: ModelOptions, vp_stage: int | None) -> None:
    """Give a role that trains the layer, and whose last chunk is `model`, its modules."""
    if options.prediction is not None:
        layer = layer_specs.prediction_spec(options.layer_spec, config, core_attention=options.core_attention)
        norm = layer_specs.block_norm(options.layer_spec)
        model.mtp = Prediction(model, layer, norm, options.prediction, vp_stage=vp_stage)
