"""A state space in place of a layer's self-attention, and the order of a stream's tokens that it needs."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.data.stream import PackedStream
from megarl.errors import ModelError
from megarl.options.state_spaces.layer import Mamba2, MambaSubmodules
from megarl.options.state_spaces.scan_order import ScanOrder, scan_order

NAME = "mamba2"


def put_into(layer: ModuleSpec, layer_spec: str, sizes: Any) -> None:
    """Put a state space of these `sizes` in the place of the self-attention of a layer, of whose linear layers it is made.

    Raises:
        ModelError: the layers are not those of the `reference` layer spec.
    """
    if layer_spec != "reference":
        raise ModelError(
            f"this model has Mamba-2 layers, which megarl computes on plain torch alone, but model.layer_spec is "
            f"'{layer_spec}'; it must be 'reference'"
        )
    parts: Any = layer.submodules
    replaced = parts.self_attention.submodules
    submodules = MambaSubmodules(replaced.linear_qkv, replaced.linear_proj)
    parts.self_attention = ModuleSpec(module=Mamba2, submodules=submodules, params={"sizes": sizes})
    # a checkpoint names the norm as under Transformer Engine, which fuses it into the linear layer
    parts.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"


def order_of(stream: PackedStream, config: TransformerConfig) -> ScanOrder:
    """The order in which the layers run over `stream`, in main memory."""
    return scan_order(stream, config.linear_conv_kernel_dim, config.context_parallel_size)
