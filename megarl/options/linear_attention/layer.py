"""Gated delta net: linear attention over packed streams, with megatron-core's parameter names and checkpoint keys.

megarl's own module, because megatron-core's needs flash-linear-attention also where it is not called, refuses packed sequences
(0.16.1), cannot begin a sequence from a shared prompt's state, and leaves the gradient of `out_norm` unsummed over tensor ranks
without sequence parallelism. Each tensor rank has whole key heads, and the value heads that read with them.

Under context parallelism the ranks exchange tokens for heads before the convolution, and back behind the states: a rank
computes some of the heads over the whole stream, so that no rank waits for the states of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megarl.data.recurrence import Recurrence, Stage
from megarl.errors import ModelError
from megarl.megatron.context_parallel import all_heads_of_own_tokens, own_heads_of_all_tokens
from megarl.megatron.sections import in_sections
from megarl.options.linear_attention.delta_net import DeltaSizes
from megarl.options.linear_attention.delta_rule import gated_delta_rule, unit_length

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Query, key, value, log decay and strength of all tokens of the stream, `[S, H, ...]`; the decay also `[S, H, K]`."""
Read = tuple[Tensor, Tensor, Tensor]
"""Places in the stream `[M]`, what their tokens read `[M, H, V]`, and states behind the runs of a stage `[R, H, K, V]`."""
StateRule = Callable[[Stage, Inputs, Tensor], Read]
"""From a stage, all tokens and the states before the stage's runs to what is read."""


@dataclass
class GatedDeltaNetSubmodules:
    """`in_proj` is split by output rows, `out_proj` by input columns; `rule` computes the states of a model of `sizes`."""

    in_proj: Any
    out_proj: Any
    rule: StateRule
    sizes: DeltaSizes


class CausalConvolution(torch.nn.Module):
    """A convolution of every channel over the last tokens, as SiLU's argument. `weight` `[C, 1, W]`, the newest token last."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels, 1, width, dtype=dtype))

    def forward(self, channels: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
        """`[S, C]` to `[S, C]`; `taps` as in `Recurrence`, `weight` is that of these channels."""
        padded = torch.cat([channels, channels.new_zeros(1, channels.shape[1])])
        of_taps = (padded[at] * tap for at, tap in zip(taps.unbind(1), weight[:, 0].unbind(1), strict=True))
        return F.silu(sum(of_taps, start=torch.zeros_like(channels)))


class OutNorm(torch.nn.Module):
    """RMSNorm of every head's output times SiLU of its gate, or its sigmoid; the weight is not zero-centred, whatever the
    model's norms are."""

    def __init__(self, width: int, epsilon: float, dtype: torch.dtype, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.epsilon, self.activation = epsilon, activation
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, heads: Tensor, gate: Tensor, group: Any) -> Tensor:
        """`[S, H, V]`, `[S, H, V]` → `[S, H, V]` in float32 or better. Ranks of `group` have other heads: their gradients of
        the weight are summed."""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=group)
        normed = F.rms_norm(heads, heads.shape[-1:], weight.to(heads.dtype), self.epsilon)
        return normed * self.activation(gate.to(heads.dtype))


class GatedDeltaNet(MegatronModule):
    """A layer's linear attention; takes the place of its self-attention."""

    gate_activation = staticmethod(F.silu)
    whole: frozenset[str] = frozenset()
    """Parameters of its own that every tensor rank has all of."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        ranks, sizes = self.tp_group.size(), submodules.sizes
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.heads_per_key, self.most_written = sizes.values // sizes.keys, sizes.most_written
        self.heads = sizes.values // ranks
        self.keys_width = sizes.keys // ranks * self.key_dim
        self.values_width = self.heads * self.value_dim
        self.rule = submodules.rule
        hidden, dtype = config.hidden_size, config.params_dtype
        self.in_proj = self._split_by_rows(submodules.in_proj, hidden, sum(self._sections().values()) * ranks)
        self.conv1d = CausalConvolution(2 * self.keys_width + self.values_width, sizes.width, dtype)
        self._make_gates(submodules)
        epsilon = config.layernorm_epsilon if sizes.norm_epsilon is None else sizes.norm_epsilon
        self.out_norm = OutNorm(self.value_dim, epsilon, dtype, self.gate_activation)
        self.out_proj = build_module(
            submodules.out_proj, self.values_width * ranks, hidden, input_is_parallel=True, **self._linear(config, "fc2")
        )

    def _make_gates(self, submodules: GatedDeltaNetSubmodules) -> None:
        """Make what decays depend on; gates of the output are rows of `in_proj`."""
        self.dt_bias = torch.nn.Parameter(torch.empty(self.heads, dtype=self.config.params_dtype))
        self.A_log = torch.nn.Parameter(torch.empty(self.heads, dtype=self.config.params_dtype))

    def _split_by_rows(self, module: Any, inputs: int, outputs: int) -> Any:
        return build_module(module, inputs, outputs, gather_output=False, **self._linear(self.config, "fc1"))

    def _linear(self, config: TransformerConfig, buffer: str) -> dict[str, Any]:
        init = config.init_method if buffer == "fc1" else config.output_layer_init_method
        shared = {"bias": False, "skip_bias_add": buffer == "fc2", "is_expert": False, "tp_comm_buffer_name": buffer}
        return {"config": config, "init_method": init, "tp_group": self.tp_group, **shared}

    def _sections(self) -> dict[str, int]:
        """Rows of this rank's `in_proj`, under the names that megatron-core's checkpoints have."""
        wide = {"query": self.keys_width, "key": self.keys_width, "value": self.values_width, "z": self.values_width}
        return wide | {"beta": self.heads, "alpha": self.heads}

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """`[S, 1, H]` (split once more under sequence parallelism) to the same; tokens in no segment come out as zero.

        `packed_seq_params.order` says which tokens follow which.
        """
        order: Recurrence = packed_seq_params.order
        channels, gate, strength, steps = self._projected(hidden_states)
        widths = [self.keys_width, self.keys_width, self.values_width]
        if self.cp_group.size() > 1:
            channels, strength, steps, widths = self._of_all_tokens(order, channels.split(widths, dim=-1), strength, steps)
        weight = self._of_own_heads(*self.conv1d.weight.split([self.keys_width, self.keys_width, self.values_width]))
        query, key, value = self.conv1d(channels, order.taps, weight).split(widths, dim=-1)
        exact = torch.promote_types(channels.dtype, torch.float32)
        query, key = (unit_length(t.to(exact).unflatten(-1, (-1, self.key_dim))) for t in (query, key))
        query, key = (t.repeat_interleave(self.heads_per_key, dim=1) for t in (query, key))
        value = value.to(exact).unflatten(-1, (-1, self.value_dim))
        strength = strength.to(exact).sigmoid() * self.most_written
        read = self._read(order, (query, key, value, self._decay(steps.to(exact)), strength))
        if self.cp_group.size() > 1:
            read = all_heads_of_own_tokens(read, order.layout, self.cp_group)
        normed = self.out_norm(read.to(exact), gate.unflatten(-1, (-1, self.value_dim)), self.tp_group)
        output, _ = self.out_proj(normed.to(channels.dtype).flatten(1)[:, None])
        return output, None

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs, the gates of the output, strengths and steps of this rank's heads, `[S/cp, ...]`."""
        mixed, _ = self.in_proj(hidden)
        wide = 2 * self.keys_width + self.values_width
        channels, gate, strength, steps = mixed[:, 0].split([wide, self.values_width, self.heads, self.heads], dim=-1)
        return channels, gate, strength, steps

    def _decay(self, steps: Tensor) -> Tensor:
        """The log of what tokens keep of the states, `[S, H]`."""
        rates, bias = (self._of_own_heads(parameter).to(steps.dtype) for parameter in (self.A_log, self.dt_bias))
        return -rates.exp() * F.softplus(steps + bias)

    def _of_all_tokens(
        self, order: Recurrence, channels: Sequence[Tensor], strength: Tensor, steps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """The convolution's inputs, strengths and steps of this rank's heads for the whole stream, in one exchange; and the
        widths of queries, keys and values among the inputs."""
        keys = self.keys_width // self.key_dim
        by_key = [part.unflatten(-1, (keys, -1)) for part in (*channels, strength, steps)]
        widths = [part.shape[-1] for part in by_key]
        whole = own_heads_of_all_tokens(torch.cat(by_key, dim=-1), order.layout, self.cp_group)
        *inputs, strength, steps = (part.flatten(1) for part in whole.split(widths, dim=-1))
        return torch.cat(inputs, dim=-1), strength, steps, [part.shape[-1] for part in inputs]

    def _of_own_heads(self, *parts: Tensor) -> Tensor:
        """Of parameters by heads, which a tensor rank has, those of the heads that this context rank computes."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        return torch.cat([part.chunk(ranks)[rank] for part in parts]) if len(parts) > 1 else parts[0].chunk(ranks)[rank]

    def _read(self, order: Recurrence, tokens: Inputs) -> Tensor:
        """What all tokens of the stream read, `[S, H, V]`."""
        value = tokens[2]
        states = value.new_zeros(1, value.shape[1], self.key_dim, self.value_dim)
        places, parts = [], []
        for stage in order.stages:
            runs = len(stage.boundaries) - 1
            before = states.expand(runs, -1, -1, -1) if stage.prefix is None else states[stage.prefix]
            at, read, states = self.rule(stage, tokens, before)
            places.append(at)
            parts.append(read)
        of_runs = torch.cat(parts)
        return of_runs.new_zeros(value.shape).index_copy(0, torch.cat(places), of_runs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None, **unused: Any
    ) -> dict[str, Any]:
        """megatron-core's checkpoint entries: `in_proj` and `conv1d` in sections, each split over the tensor ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        whole = {name: own.pop(name) for name in self.whole & own.keys()}
        own["conv1d.weight"] = self.conv1d.weight
        entries = make_sharded_tensors_for_checkpoint(whole, prefix, {}, sharded_offsets, **groups)
        entries |= make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups)
        for name, module in self.named_children():
            if name != "conv1d":
                of_module = (module, f"{prefix}{name}.", sharded_offsets, metadata)
                entries |= sharded_state_dict_default(*of_module, tp_group=self.tp_group)
        sections = self._sections()
        channels = {name: sections[name] for name in ("query", "key", "value")}
        for name, rows in (("in_proj.weight", sections), ("conv1d.weight", channels)):
            entries[prefix + name] = in_sections(entries[prefix + name], rows)
        return entries


def plain_rule(stage: Stage, tokens: Inputs, before: Tensor) -> Read:
    """The `StateRule` of the `reference` layer spec: runs of similar length are computed together."""
    query, key, value, decay, strength = tokens
    query = query * query.shape[-1] ** -0.5
    places, parts, states, runs_of_states = [], [], [], []
    for runs in stage.padded:
        q, k, v = (t[runs.tokens] for t in (query, key, value))
        g, b = (t[runs.tokens] * runs.real.view(*runs.real.shape, *[1] * (t.dim() - 1)) for t in (decay, strength))
        read, behind = gated_delta_rule(q, k, v, g, b, before[runs.runs])
        parts.append(read.flatten(0, 1)[runs.source])
        places.append(runs.target)
        states.append(behind)
        runs_of_states.append(runs.runs)
    return torch.cat(places), torch.cat(parts), torch.cat(states)[torch.cat(runs_of_states).argsort()]


def fla_rule(*, by_channel: bool = False) -> StateRule:
    """The `StateRule` of the `transformer_engine` layer spec: flash-linear-attention's kernels, which need a GPU.

    `by_channel`: each channel of the keys has a decay of its own.

    Raises:
        ModelError: they are not installed.
    """
    try:
        if by_channel:
            from fla.ops.kda import chunk_kda as kernel
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    except ImportError:
        raise ModelError(
            "this model has linear attention, whose kernels model.layer_spec = 'transformer_engine' takes from "
            "flash-linear-attention: pip install flash-linear-attention, or set model.layer_spec to 'reference'"
        ) from None

    def rule(stage: Stage, tokens: Inputs, before: Tensor) -> Read:
        query, key, value, decay, strength = (t[stage.tokens][None] for t in tokens)
        read, states = kernel(
            *(t.to(torch.bfloat16) for t in (query, key, value)),
            g=decay,
            beta=strength,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=stage.boundaries,  # the same object for every layer, by which fla knows what it has computed of it
        )
        return stage.tokens, read[0], states

    return rule
