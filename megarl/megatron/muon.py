"""Muon for the matrices of the decoder's layers, in every layout the update of the whole Hugging Face matrix.

megatron-core's own needs a package that Python 3.11 cannot have, runs without the distributed optimizer that megarl's
checkpoints are made of, and takes gate and up of an MLP for one matrix. Here each Hugging Face matrix is orthogonalised by
itself: slices of its momentum meet on one data-parallel rank, in turn, and the update goes back. The rest is Adam's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megarl.megatron.optimizer_state import MUON_KEY, OwnedSlice, owned_slice
from megarl.megatron.options import OptimizerOptions
from megarl.models.weight_map import BoundRule
from megarl.models.weight_tensors import hf_from_shards, shard_from_hf

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz step of Muon's author (https://kellerjordan.github.io/posts/muon)."""
RMS = 0.2
"""Root mean square of an update's elements, about AdamW's, so that both share learning rates (arXiv 2502.16982, eq. 4)."""


def is_matrix(rule: BoundRule) -> bool:
    """Return whether Muon updates a parameter: matrices of the decoder's layers, those of routers and experts included."""
    return rule.layer is not None and rule.dtype is None and all(len(shape) == 2 for shape in rule.hf_shapes.values())


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz steps on `matrix` `[m, n]`, in its own dtype: singular values come near 1, singular vectors stay."""
    estimate = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    estimate = estimate / estimate.norm().clamp_min(1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        square = estimate @ estimate.T
        estimate = a * estimate + (b * square + c * square @ square) @ estimate
    return estimate.T if matrix.shape[0] > matrix.shape[1] else estimate


def add_muon(parts: Sequence[Any], rules: Mapping[Tensor, BoundRule], options: OptimizerOptions) -> None:
    """Have each distributed optimizer of `parts` update the matrices among its parameters by Muon, before Adam does the rest.

    `rules` are those of all matrices of this rank.
    """
    for part in parts:
        matrices = [
            (parameter, rules[parameter])
            for buffer in part.buffers
            for parameter in buffer.param_index_map
            if parameter in rules
        ]
        part.optimizer.register_step_pre_hook(_Muon(part, matrices, options))


class _Muon:
    """The work before a step of one distributed optimizer's Adam; collective over its data-parallel and tensor ranks."""

    def __init__(self, part: Any, matrices: list[tuple[Tensor, BoundRule]], options: OptimizerOptions) -> None:
        self.part, self.matrices, self.options = part, matrices, options

    @torch.no_grad()
    def __call__(self, *unused: Any) -> None:
        group = self.part.data_parallel_group
        for number, (parameter, rule) in enumerate(self.matrices):
            computes = torch.distributed.get_global_rank(group, number % group.size())
            owned = owned_slice(self.part, parameter)
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if owned is not None:
                whole[owned.place] = self._momentum(owned)
            if group.size() > 1:
                torch.distributed.reduce(whole, computes, group=group)
            if torch.distributed.get_rank() == computes:
                whole.copy_(self._update(whole.view(parameter.shape), rule).flatten())
            if group.size() > 1:
                torch.distributed.broadcast(whole, computes, group=group)
            if owned is not None:
                rate, decay = owned.group["lr"], owned.group["weight_decay"]
                owned.main.mul_(1 - rate * decay).sub_(whole[owned.place].view(owned.main.shape), alpha=rate)
                owned.main.grad = None  # Adam leaves alone what has none

    def _momentum(self, mine: OwnedSlice) -> Tensor:
        """Nesterov's momentum of a slice after this step's gradient."""
        state, beta = self.part.optimizer.state[mine.main], self.options.momentum
        gradient = mine.main.grad if mine.main.grad is not None else torch.zeros_like(mine.main)
        if MUON_KEY not in state:
            state[MUON_KEY] = torch.zeros_like(mine.main)
        state[MUON_KEY].lerp_(gradient, 1 - beta)
        return gradient.lerp(state[MUON_KEY], beta).flatten()

    def _update(self, shard: Tensor, rule: BoundRule) -> Tensor:
        """This rank's shard of the update, from the tensor ranks' shards of the momentum."""
        if rule.expert is not None:
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
        shards = [shard]
        if rule.tp_axis is not None and group.size() > 1:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            torch.distributed.all_gather(shards, shard.contiguous(), group=group)
        updates = {name: self._scaled(matrix) for name, matrix in hf_from_shards(rule, shards)}
        rank = group.rank() if len(shards) > 1 else 0
        return shard_from_hf(rule, updates.__getitem__, rank, len(shards))

    def _scaled(self, matrix: Tensor) -> Tensor:
        return RMS * math.sqrt(max(matrix.shape)) * orthogonalised(matrix, self.options.newton_schulz_steps)
