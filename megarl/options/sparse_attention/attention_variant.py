"""Attention to chosen keys in place of a layer's self-attention, and what it must know of a stream."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.data.stream import PackedStream, StreamShard, context_parallel_shard
from megarl.errors import LayoutError
from megarl.options.sparse_attention.attention import IndexedAttention, IndexedLatentAttention
from megarl.options.sparse_attention.calls import IndexedOrder, ToldKeys, indexed_order
from megarl.options.sparse_attention.column import COLUMN
from megarl.options.sparse_attention.sparse_family import VARIANT, Indexing

NAME = VARIANT


def put_into(layer: ModuleSpec, layer_spec: str, sizes: Any) -> None:
    """Have the latent attention of a `reference` layer attend to chosen keys; `sizes` are for linear attention.

    Raises:
        LayoutError: the layer is Transformer Engine's.
    """
    if layer_spec != "reference":
        raise LayoutError(
            f"model.layer_spec is '{layer_spec}', but this model attends to keys that an indexer chooses, which megatron-core "
            "0.16.1 does not do on packed sequences, and 0.19.2 not as was proven here; it must be 'reference'"
        )
    attention: Any = layer.submodules.self_attention
    attention.module, attention.submodules.core_attention = IndexedLatentAttention, IndexedAttention


def order_of(stream: PackedStream, config: TransformerConfig) -> IndexedOrder:
    """The calls of this rank's queries of `stream`, in main memory."""
    ranks, rank = config.context_parallel_size, parallel_state.get_context_parallel_rank()
    shard = context_parallel_shard(stream, ranks, rank)
    told = _told(stream, shard, config)
    return indexed_order(stream, shard, weighted=config.dsa_indexer_loss_coeff is not None, told=told)


def _told(stream: PackedStream, shard: StreamShard, config: TransformerConfig) -> ToldKeys | None:
    """The choices of keys that come with the tokens of `shard`; positions behind the longest sequence are left out."""
    keys = stream.extra.get(COLUMN.name)
    if keys is None:
        return None
    assert isinstance(config.linear_attention_freq, list)
    indexers = sum(Indexing.CHOOSES in Indexing(kind) for kind in config.linear_attention_freq)
    if keys.shape[1] != indexers:
        raise ValueError(f"chosen keys are of {keys.shape[1]} indexers, but the model has {indexers}")
    width = int(stream.position_ids.max()) // 8 + 1
    return ToldKeys(keys[shard.positions, :, :width].transpose(0, 1).contiguous())
