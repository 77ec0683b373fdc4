"""Mamba-2 over packed streams, with megatron-core's parameter names and checkpoint keys.

megarl's own module, because megatron-core's needs the kernels of mamba-ssm also where they are not called, cannot begin a
sequence from a shared prompt's state, and wants as many groups as tensor ranks. Each tensor rank has whole heads. It has whole
groups too if there are enough; else it computes a share of the rows of B and C, which the ranks then gather.

Context ranks share out a tensor rank's heads, and exchange tokens for them: each runs over the whole stream with its own. They
exchange groups in the same way if there are enough for all ranks; else each gets B and C of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megarl.data.recurrence import Stage
from megarl.megatron.context_parallel import all_heads_of_own_tokens, all_tokens, own_heads_of_all_tokens
from megarl.megatron.norms import rms_norm
from megarl.megatron.sections import in_sections
from megarl.options.state_spaces.mamba import MambaSizes
from megarl.options.state_spaces.scan import chunked_scan
from megarl.options.state_spaces.scan_order import ScanOrder


@dataclass
class MambaSubmodules:
    """`in_proj` is split by output rows, `out_proj` by input columns."""

    in_proj: Any
    out_proj: Any


class Convolution(torch.nn.Module):
    """A causal convolution of every channel, and SiLU. `weight` `[C, 1, W]`, the newest token last, `bias` `[C]` or None."""

    def __init__(self, channels: int, width: int, *, has_bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels, 1, width, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(channels, dtype=dtype)) if has_bias else None

    def forward(self, channels: Tensor, order: ScanOrder, own: Callable[[Tensor], Tensor]) -> Tensor:
        """`[S, C]` to `[S, C]`, channels of which `own` of a parameter takes the rows."""
        weight, bias = own(self.weight)[:, 0], None if self.bias is None else own(self.bias)
        size, width = len(channels), weight.shape[-1]
        of_taps, nothing = weight.unbind(1), channels.new_zeros(width, channels.shape[1])
        padded = torch.cat([nothing[1:], channels, nothing[:1]])  # behind the stream's end a row of zeros, for those without
        found = sum((padded[n : n + size] * tap for n, tap in enumerate(of_taps)), start=torch.zeros_like(channels))
        if len(order.begins):
            seen = padded.index_select(0, order.seen.flatten() + width - 1).unflatten(0, (-1, width))
            found = found.index_copy(0, order.begins, (seen * weight.T).sum(1))
        return F.silu(found if bias is None else found + bias)


class GatedNorm(torch.nn.Module):
    """RMSNorm of the heads' outputs times SiLU of their gates, in `groups` of heads; tensor ranks may share a group."""

    def __init__(self, sizes: MambaSizes, epsilon: float, dtype: torch.dtype, tp_group: Any) -> None:
        super().__init__()
        self.epsilon, self.tp_group = epsilon, tp_group
        self.groups, self.group_width = sizes.norm_groups, sizes.inner // sizes.norm_groups
        self.weight = torch.nn.Parameter(torch.ones(sizes.inner // tp_group.size(), dtype=dtype))

    def forward(self, heads: Tensor, gate: Tensor) -> Tensor:
        """`[S, H, P]` and `[S, H * P]` to `[S, H * P]`, in float32 or better."""
        gated = heads.flatten(1) * F.silu(gate.to(heads.dtype))
        weight = self.weight.to(heads.dtype)
        if self.groups % self.tp_group.size() == 0:
            ones = weight.new_ones(self.group_width)
            return rms_norm(gated.unflatten(1, (-1, self.group_width)), ones, self.epsilon).flatten(1) * weight
        return gated * self._scale(gated, heads.shape[1]).repeat_interleave(heads.shape[2], dim=1) * weight

    def _scale(self, gated: Tensor, heads: int) -> Tensor:
        """`[S, H]`: what each head is multiplied by, by the squares of all ranks' heads in its group."""
        of_heads = torch.arange(heads, device=gated.device) + self.tp_group.rank() * heads
        group = of_heads * self.groups // (heads * self.tp_group.size())
        member = F.one_hot(group, self.groups).to(gated.dtype)  # [H, K]
        squares = gated.square().unflatten(1, (heads, -1)).sum(-1) @ member
        summed = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
        summed = copy_to_tensor_model_parallel_region(summed, group=self.tp_group)
        return torch.rsqrt(summed / self.group_width + self.epsilon) @ member.T

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight, split as the heads are."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets, **groups
        )
        return sharded


class Mamba2(MegatronModule):
    """A layer's state space; takes the place of its self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        *,
        sizes: MambaSizes,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.sizes = layer_number, sizes
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        ranks = self.tp_group.size()
        self.heads, self.inner, self.shared = sizes.num_heads // ranks, sizes.inner // ranks, sizes.shared // ranks
        self.own_heads = self.heads // self.cp_group.size()
        self.own_inner = self.own_heads * sizes.head_dim
        hidden, dtype = config.hidden_size, config.params_dtype
        rows = sum(self._sections().values()) * ranks
        self.in_proj = build_module(submodules.in_proj, hidden, rows, gather_output=False, **self._linear(config, "fc1"))
        channels = self.inner + 2 * self.shared
        self.conv1d = Convolution(channels, sizes.width, has_bias=sizes.conv_bias, dtype=dtype)
        self.dt_bias = torch.nn.Parameter(torch.empty(self.heads, dtype=dtype))
        self.A_log = torch.nn.Parameter(torch.empty(self.heads, dtype=dtype))
        self.D = torch.nn.Parameter(torch.empty(self.heads, dtype=dtype))
        self.norm = GatedNorm(sizes, config.layernorm_epsilon, dtype, self.tp_group)
        self.out_proj = build_module(
            submodules.out_proj, sizes.inner, hidden, input_is_parallel=True, **self._linear(config, "fc2")
        )

    def _linear(self, config: TransformerConfig, buffer: str) -> dict[str, Any]:
        init = config.init_method if buffer == "fc1" else config.output_layer_init_method
        shared = {"bias": False, "skip_bias_add": buffer == "fc2", "is_expert": False, "tp_comm_buffer_name": buffer}
        return {"config": config, "init_method": init, "tp_group": self.tp_group, **shared}

    def _sections(self) -> dict[str, int]:
        """Rows of this rank's `in_proj`, under the names that megatron-core's checkpoints have."""
        return {"z": self.inner, "x": self.inner, "B": self.shared, "C": self.shared, "dt": self.heads}

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """`[S/cp, 1, H]` (split once more under sequence parallelism) to the same; of tokens in no segment the state space
        reads zero.

        `packed_seq_params.order` says which tokens follow which.
        """
        order: ScanOrder = packed_seq_params.order
        mixed, _ = self.in_proj(hidden_states)
        gate, channels, steps = mixed[:, 0].split([self.inner, self.inner + 2 * self.shared, self.heads], dim=-1)
        exact = torch.promote_types(mixed.dtype, torch.float32)
        if self.cp_group.size() > 1:
            channels, steps = self._of_all_tokens(order, channels, steps)
        channels = self.conv1d(channels, order, self._own_channels).to(exact)
        inputs, of_groups = channels.tensor_split([self.own_inner], dim=-1)
        steps = F.softplus(steps.to(exact) + self._own(self.dt_bias).to(exact)).clamp(*self.sizes.steps)
        read = self._read(order, torch.cat([inputs, self._groups(of_groups), steps], dim=-1))
        if self.cp_group.size() > 1:
            read = all_heads_of_own_tokens(read, order.layout, self.cp_group)
        normed = self.norm(read, gate)
        output, _ = self.out_proj(normed.to(mixed.dtype)[:, None])
        return output, None

    @property
    def _splits_groups(self) -> bool:
        """Return whether each rank has whole groups."""
        return self.sizes.splits_groups(self.tp_group.size() * self.cp_group.size())

    def _of_all_tokens(self, order: ScanOrder, channels: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """The convolution's inputs and the steps of the heads that this context rank runs, for the whole stream."""
        inputs, *of_groups = channels.split([self.inner, self.shared, self.shared], dim=-1)
        by_rank = [part.unflatten(1, (self.cp_group.size(), -1)) for part in (inputs, steps, *of_groups)]
        by_rank = by_rank if self._splits_groups else by_rank[:2]
        whole = own_heads_of_all_tokens(torch.cat(by_rank, dim=-1), order.layout, self.cp_group)[:, 0]
        inputs, steps, groups = whole.tensor_split([self.own_inner, self.own_inner + self.own_heads], dim=-1)
        if not self._splits_groups:
            groups = all_tokens(torch.cat(of_groups, dim=-1), order.layout, self.cp_group)
        return torch.cat([inputs, groups], dim=-1), steps

    def _own(self, parameter: Tensor) -> Tensor:
        """The part of a tensor rank's parameter, by heads or groups, of the heads that this context rank runs."""
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _own_channels(self, parameter: Tensor) -> Tensor:
        """The rows of a parameter of the convolution that are of the channels which this rank computes."""
        if self.cp_group.size() == 1:
            return parameter
        inputs, *of_groups = parameter.split([self.inner, self.shared, self.shared])
        return torch.cat([self._own(inputs), *(map(self._own, of_groups) if self._splits_groups else of_groups)])

    def _groups(self, of_groups: Tensor) -> Tensor:
        """B and C `[S, 2 * G * N]` of the groups that this rank's heads read, of its share of both."""
        sizes, ranks = self.sizes, self.tp_group.size()
        if self._splits_groups:
            return of_groups
        whole, first = of_groups.unflatten(1, (2, -1)).permute(2, 1, 0), 0
        if sizes.groups % ranks:
            # The backward pass sums over the ranks what each one's heads ask of a group.
            whole = gather_from_sequence_parallel_region(
                whole.contiguous(), tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            first = self.tp_group.rank() * sizes.groups // ranks
        number = self.tp_group.rank() * self.cp_group.size() + self.cp_group.rank()
        heads = torch.arange(self.own_heads, device=of_groups.device) + number * self.own_heads
        groups = heads * sizes.groups // sizes.num_heads - first
        if sizes.num_heads // sizes.groups % self.own_heads == 0:  # all of the same group
            groups = groups[:1]
        return whole.unflatten(0, (-1, sizes.state))[groups].permute(3, 2, 0, 1).flatten(1)

    def _read(self, order: ScanOrder, tokens: Tensor) -> Tensor:
        """Reads of all tokens of the stream, and their own input by D, `[S, H, P]`; `tokens` have inputs, B and C, steps."""
        shape = (self.own_heads, self.sizes.head_dim)
        states = tokens.new_zeros(1, *shape, self.sizes.state)
        places: list[Tensor] = []
        parts: list[Tensor] = []
        for stage in order.stages:
            runs = len(stage.boundaries) - 1
            before = states.expand(runs, -1, -1, -1) if stage.prefix is None else states[stage.prefix]
            states = self._run(stage, tokens, before, places, parts)
        return tokens.new_zeros(len(tokens), *shape).index_copy(0, torch.cat(places), torch.cat(parts))

    def _run(self, stage: Stage, tokens: Tensor, before: Tensor, places: list[Tensor], parts: list[Tensor]) -> Tensor:
        """The states `[R, H, P, N]` behind the runs of a stage; where its tokens are, and what they read, joins the lists.

        Runs of similar length are computed together.
        """
        rates, own = -self._own(self.A_log).to(tokens.dtype).exp(), self._own(self.D).to(tokens.dtype)[:, None]
        of_groups = (tokens.shape[1] - self.own_inner - self.own_heads) // 2
        widths = [self.own_inner, of_groups, of_groups, self.own_heads]
        behind, numbers = [], []
        for runs in stage.padded:
            taken = tokens.index_select(0, runs.tokens.flatten()).unflatten(0, runs.tokens.shape)
            inputs, writes, reads, steps = taken.split(widths, dim=-1)
            inputs = inputs.unflatten(-1, (self.own_heads, -1))
            writes, reads = (t.unflatten(-1, (-1, self.sizes.state)) for t in (writes, reads))
            steps = steps * runs.real[..., None]
            found, after = chunked_scan(inputs, steps, rates, writes, reads, before[runs.runs])
            parts.append((found + inputs * own).flatten(0, 1).index_select(0, runs.source))
            places.append(runs.target)
            behind.append(after)
            numbers.append(runs.runs)
        return torch.cat(behind)[torch.cat(numbers).argsort()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None, **unused: Any
    ) -> dict[str, Any]:
        """megatron-core's checkpoint entries: `in_proj` and `conv1d` in sections, each split over the tensor ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        tensors: dict[str, Any] = {}
        self._save_to_state_dict(tensors, "", keep_vars=True)
        of_convolution = {f"conv1d.{name}": tensor for name, tensor in self.conv1d.named_parameters()}
        tensors |= of_convolution
        split = dict.fromkeys(tensors, 0)
        entries = make_sharded_tensors_for_checkpoint(tensors, prefix, split, sharded_offsets, **groups)
        for name in ("in_proj", "norm", "out_proj"):
            of_module = (getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata)
            entries |= sharded_state_dict_default(*of_module, tp_group=self.tp_group)
        sections = self._sections()
        channels = {name: sections[name] for name in ("x", "B", "C")}
        for name, rows in {"in_proj.weight": sections, **dict.fromkeys(of_convolution, channels)}.items():
            entries[prefix + name] = in_sections(entries[prefix + name], rows)
        return entries
