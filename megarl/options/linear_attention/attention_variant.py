"""Linear attention in place of a layer's self-attention, and the order of a stream's tokens that it needs."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.data.recurrence import Recurrence, recurrence_of
from megarl.data.stream import PackedStream
from megarl.options.linear_attention.delta_net import DeltaSizes
from megarl.options.linear_attention.kimi_delta import KimiDeltaAttention
from megarl.options.linear_attention.layer import GatedDeltaNet, GatedDeltaNetSubmodules, fla_rule, plain_rule

NAME = "gated_delta_net"


def put_into(layer: ModuleSpec, layer_spec: str, sizes: DeltaSizes) -> None:
    """Put linear attention in the place of the self-attention of a layer of `layer_spec`, of whose linear layers it is made.

    Raises:
        ModelError: the kernels that Transformer Engine's layers take are not installed.
    """
    parts: Any = layer.submodules
    replaced, is_reference = parts.self_attention.submodules, layer_spec == "reference"
    rule = plain_rule if is_reference else fla_rule(by_channel=sizes.by_channel)
    is_latent = hasattr(replaced, "linear_q_proj")  # whose input norm is by itself under any layer spec
    in_proj = replaced.linear_q_proj if is_latent else replaced.linear_qkv
    module = KimiDeltaAttention if sizes.by_channel else GatedDeltaNet
    submodules = GatedDeltaNetSubmodules(in_proj, replaced.linear_proj, rule, sizes)
    parts.self_attention = ModuleSpec(module=module, submodules=submodules)
    if is_reference and not is_latent:  # a checkpoint names the norm as under Transformer Engine: in the linear layer
        parts.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"


def order_of(stream: PackedStream, config: TransformerConfig) -> Recurrence:
    """The order in which the layers run over `stream`, in main memory."""
    return recurrence_of(stream, config.linear_conv_kernel_dim, config.context_parallel_size)
