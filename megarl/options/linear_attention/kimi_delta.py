"""Kimi's delta attention (arXiv:2510.26692): a gated delta net whose states decay channel by channel of the keys.

Decays and the gates of the output come out of narrow projections, which are whole on every tensor rank, and wide ones, which
are split by heads. The gate of the output is a sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from megarl.megatron.latent_attention import ReplicatedLinear
from megarl.options.linear_attention.layer import GatedDeltaNet, GatedDeltaNetSubmodules


class KimiDeltaAttention(GatedDeltaNet):
    """The layer; the parameters beside those of `GatedDeltaNet` are megarl's own."""

    gate_activation: Any = staticmethod(torch.sigmoid)
    whole = frozenset({"A_log"})

    def _make_gates(self, submodules: GatedDeltaNetSubmodules) -> None:
        hidden, dim, dtype = self.config.hidden_size, self.key_dim, self.config.params_dtype
        width = self.keys_width * self.tp_group.size()
        self.linear_f_down, self.linear_g_down = (ReplicatedLinear(hidden, dim, self.config) for _ in range(2))
        self.linear_f_up, self.linear_g_up = (self._split_by_rows(submodules.in_proj, dim, width) for _ in range(2))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.keys_width, dtype=dtype))
        # One number per head, in a shape that no row or column of it can be split off.
        self.A_log = torch.nn.Parameter(torch.empty(1, 1, submodules.sizes.keys, 1, dtype=dtype))

    def _sections(self) -> dict[str, int]:
        wide = dict.fromkeys(("query", "key", "value"), self.keys_width)
        return wide | {"beta": self.heads}

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, _ = self.in_proj(hidden)
        channels, strength = mixed[:, 0].split([3 * self.keys_width, self.heads], dim=-1)
        gate, _ = self.linear_g_up(self.linear_g_down(hidden))
        steps, _ = self.linear_f_up(self.linear_f_down(hidden))
        return channels, gate[:, 0], strength, steps[:, 0]

    def _decay(self, steps: Tensor) -> Tensor:
        """The log of what tokens keep of the states, `[S, H, K]`."""
        group = self.tp_group
        of_rank = copy_to_tensor_model_parallel_region(self.A_log, group=group).flatten().chunk(group.size())[group.rank()]
        rates = self._of_own_heads(of_rank).to(steps.dtype).exp()
        biased = (steps + self._of_own_heads(self.dt_bias).to(steps.dtype)).unflatten(-1, (-1, self.key_dim))
        return -rates.unsqueeze(-1) * F.softplus(biased)
