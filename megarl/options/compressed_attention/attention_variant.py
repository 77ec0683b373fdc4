"""Compressed attention in place of a layer's self-attention, between hyper-connections, and what it must know of a stream."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.data.stream import PackedStream, context_parallel_shard
from megarl.errors import LayoutError
from megarl.megatron.own_mixtures import parts_of
from megarl.options.compressed_attention.attention import CompressedAttention, Projections
from megarl.options.compressed_attention.layer import HyperLayer
from megarl.options.compressed_attention.routers import RootRouter
from megarl.options.compressed_attention.sizes import VARIANT, LayerKind
from megarl.options.compressed_attention.windows import CompressedOrder, compressed_order

NAME = VARIANT


def put_into(layer: ModuleSpec, layer_spec: str, sizes: Any) -> None:
    """Have a layer of experts attend as these `sizes` say, between hyper-connections; its linear layers stay.

    Raises:
        LayoutError: the layers are not those of the `reference` layer spec.
    """
    if layer_spec != "reference":
        raise LayoutError(
            f"model.layer_spec is '{layer_spec}', but this model has compressed attention and hyper-connections, which megarl "
            "computes on plain torch alone; it must be 'reference'"
        )
    parts: Any = layer.submodules
    replaced = parts.self_attention.submodules
    projections = Projections(replaced.linear_qkv, replaced.linear_proj)
    parts.self_attention = ModuleSpec(module=CompressedAttention, submodules=projections, params={"sizes": sizes})
    parts_of(parts.mlp).router = RootRouter
    parts.sharded_state_dict_keys_map = {}
    layer.module, layer.params = HyperLayer, {**(layer.params or {}), "sizes": sizes}


def order_of(stream: PackedStream, config: TransformerConfig) -> CompressedOrder:
    """The order of this rank's tokens of `stream`, in main memory."""
    assert isinstance(config.linear_attention_freq, list)
    share = context_parallel_shard(stream, config.context_parallel_size, parallel_state.get_context_parallel_rank())
    rates = sorted({LayerKind.decoded(entry)[0] for entry in config.linear_attention_freq})
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    return compressed_order(stream, share, rates, config.linear_conv_kernel_dim, heads)
