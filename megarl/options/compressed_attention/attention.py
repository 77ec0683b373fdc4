"""Attention of many heads to one key, which is the value too, of the last tokens and of compressed windows, on plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.megatron.attention import PackedSequences
from megarl.megatron.latent_attention import ReplicatedLinear
from megarl.megatron.norms import ReferenceRMSNorm, UnitNorm
from megarl.options.compressed_attention.attended import attend
from megarl.options.compressed_attention.compressor import Compressor, WindowIndexer
from megarl.options.compressed_attention.rotation import Waves
from megarl.options.compressed_attention.sizes import CompressedSizes
from megarl.options.compressed_attention.windows import CompressedOrder


@dataclass
class Projections:
    """`queries` is split by output rows, `output` by input columns."""

    queries: Any
    output: Any


class _SplitByRows(torch.nn.Module):
    """A module whose parameters are split over the tensor ranks by rows."""

    tp_group: Any

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Each parameter, split along its first axis."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]}
        tensors = self.state_dict(prefix="", keep_vars=True)
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            tensors, prefix, dict.fromkeys(tensors, 0), sharded_offsets, **groups
        )
        return entries


class CoreAttention(_SplitByRows):
    """Attention with a sink for each head, in blocks of queries."""

    def __init__(self, config: TransformerConfig, sizes: CompressedSizes, tp_group: Any) -> None:
        super().__init__()
        self.tp_group, self.window, self.scale = tp_group, sizes.window, sizes.head_dim**-0.5
        self.sinks = torch.nn.Parameter(torch.empty(sizes.num_heads // tp_group.size(), dtype=config.params_dtype))

    def forward(
        self, query: Tensor, keys: Tensor, compressed: Tensor, choices: Tensor | None, order: CompressedOrder, rate: int
    ) -> Tensor:
        """`[n, h, d]` from `query` `[n, h, d]`, `keys` `[N, d]` of all tokens and `compressed` `[E, d]` of all windows."""
        return attend(query, keys, compressed, self.sinks, choices, order.calls[rate], (self.window, rate, self.scale))


class GroupProjection(_SplitByRows):
    """A projection of each group of heads for itself; a rank has whole groups."""

    def __init__(self, config: TransformerConfig, sizes: CompressedSizes, tp_group: Any) -> None:
        super().__init__()
        self.tp_group, self.groups = tp_group, sizes.groups // tp_group.size()
        shape = (self.groups * sizes.group_rank, sizes.num_heads * sizes.head_dim // sizes.groups)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))

    def forward(self, heads: Tensor) -> Tensor:
        """`[n, h, d]` to `[n, groups * r]`."""
        of_groups = heads.flatten(1).unflatten(1, (self.groups, -1)).transpose(0, 1)
        return torch.bmm(of_groups, self.weight.unflatten(0, (self.groups, -1)).mT).transpose(0, 1).flatten(1)


class CompressedAttention(MegatronModule):
    """A layer's attention; takes the place of its self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Projections,
        layer_number: int,
        pg_collection: Any = None,
        *,
        sizes: CompressedSizes,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.head_dim, self.rate = sizes.head_dim, sizes.rates[layer_number - 1]
        hidden, epsilon = config.hidden_size, sizes.epsilon
        self.linear_q_down_proj = ReplicatedLinear(hidden, sizes.query_rank, config)
        self.q_layernorm = ReferenceRMSNorm(config, sizes.query_rank, epsilon)
        width = sizes.num_heads * sizes.head_dim
        self.linear_q_up_proj = build_module(
            submodules.queries, sizes.query_rank, width, gather_output=False, **self._linear(config, "fc1")
        )
        self.q_unit = UnitNorm(config, sizes.head_dim, epsilon)
        self.linear_kv_proj = ReplicatedLinear(hidden, sizes.head_dim, config)
        self.kv_layernorm = ReferenceRMSNorm(config, sizes.head_dim, epsilon)
        self.waves = Waves(sizes, compressed=bool(self.rate))
        chooses = sizes.choosing[layer_number - 1]
        self.compressor = (
            Compressor(config, sizes.head_dim, self.rate, overlaps=chooses, epsilon=epsilon) if self.rate else None
        )
        self.indexer = WindowIndexer(config, sizes, self.rate, self.tp_group) if chooses else None
        self.core_attention = CoreAttention(config, sizes, self.tp_group)
        self.group_proj = GroupProjection(config, sizes, self.tp_group)
        self.linear_proj = build_module(
            submodules.output,
            sizes.groups * sizes.group_rank,
            hidden,
            input_is_parallel=True,
            **self._linear(config, "fc2"),
        )

    def _linear(self, config: TransformerConfig, buffer: str) -> dict[str, Any]:
        init = config.init_method if buffer == "fc1" else config.output_layer_init_method
        shared = {"bias": False, "skip_bias_add": buffer == "fc2", "is_expert": False, "tp_comm_buffer_name": buffer}
        return {"config": config, "init_method": init, "tp_group": self.tp_group, **shared}

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedSequences | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """`[S, 1, H]` (split once more under sequence parallelism) to the same; of tokens in no segment attention is zero."""
        assert packed_seq_params is not None, "compressed attention runs packed streams only"
        assert packed_seq_params.position_ids is not None
        order, positions = packed_seq_params.order, packed_seq_params.position_ids
        latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        query, _ = self.linear_q_up_proj(latent)
        query = self.waves.rotated(self.q_unit(query[:, 0].unflatten(-1, (-1, self.head_dim))), positions)
        keys, compressed = self._keys(hidden_states, positions, order)
        choices = None
        if self.indexer is not None:
            of_indexer = (hidden_states.detach(), latent.detach(), positions, self.waves, order, self.cp_group)
            choices = self.indexer(*of_indexer)
        attended = self.core_attention(query, keys, compressed, choices, order, self.rate)
        grouped = self.group_proj(self.waves.rotated(attended, positions, back=True))
        output, _ = self.linear_proj(grouped[:, None])
        return output, None

    def _keys(self, hidden: Tensor, positions: Tensor, order: CompressedOrder) -> tuple[Tensor, Tensor]:
        """Keys `[N, d]` of all tokens and `[E, d]` of all windows; their gradients are sums over the tensor ranks' heads."""
        parts = [self.kv_layernorm(self.linear_kv_proj(hidden))]
        if self.compressor is not None:
            parts.append(self.compressor.projected(hidden))
        tokens = torch.cat(parts, dim=-1)
        if self.config.sequence_parallel:  # going backward all ranks have the gradients of all tokens
            tokens = gather_from_sequence_parallel_region(tokens, tensor_parallel_output_grad=False, group=self.tp_group)
        own, projected = tokens[:, 0].split([self.head_dim, tokens.shape[-1] - self.head_dim], dim=-1)
        own = self.waves.rotated(own, positions)
        if self.cp_group.size() > 1:  # going backward, each rank's queries ask something of a key
            both = torch.cat([own, projected], dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            own, projected = both.split([self.head_dim, projected.shape[-1]], dim=-1)
        compressed = own[:0]
        if self.compressor is not None:
            compressed = self.compressor(projected, order.windows[self.rate], self.waves)
        both = copy_to_tensor_model_parallel_region(torch.cat([own, compressed]), group=self.tp_group)
        keys, compressed = both.split([len(own), len(compressed)])
        return keys, compressed
