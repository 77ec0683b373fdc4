"""Weights of data-parallel replicas, compared: silent damage makes one of them differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.layout import Layout

if TYPE_CHECKING:
    from megarl.megatron.rank_model import RankModel


def digests_of_weights(model: RankModel) -> tuple[int, int]:
    """Digests of the bits of the rank's weights, of experts apart: they are replicated over other ranks."""
    import torch
    import xxhash

    digests = []
    for of_experts in (False, True):
        weights = [
            parameter.detach()
            for chunk in model.chunks
            for parameter in chunk.parameters()
            if getattr(parameter, "allreduce", True) != of_experts
        ]
        digest = xxhash.xxh3_64()
        for weight in (weight for weight in weights if weight.is_cpu):  # a third of the time of the operator below
            digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
        if hashes := [torch.hash_tensor(weight) for weight in weights if not weight.is_cpu]:
            digest.update(torch.stack(hashes).view(torch.int64).cpu().numpy().data)
        digests.append(digest.intdigest())
    return digests[0], digests[1]


class WatchedStep:
    """An optimizer's `step` that takes the digests of the weights first: behind it they are gathered anew from their owners.

    A weight that was damaged on one rank would differ no more then, though the gradients of all have it in them.
    """

    def __init__(self, model: RankModel) -> None:
        self._model, self._step = model, model.optimizer.step
        self.digests: list[tuple[int, int]] = []
        model.optimizer.step = self

    def __call__(self) -> Any:
        self.digests.append(digests_of_weights(self._model))
        return self._step()

    def end(self) -> None:
        """Have the optimizer as it was."""
        self._model.optimizer.step = self._step


def begin_watch(model: RankModel) -> list[tuple[int, int]]:
    """Have digests taken at each optimizer step from now on; returns those of now."""
    if isinstance(model.optimizer.step, WatchedStep):  # of an attempt that was cut short
        model.optimizer.step.end()
    WatchedStep(model)
    return [digests_of_weights(model)]


def end_watch(model: RankModel) -> list[tuple[int, int]]:
    """Digests at each optimizer step since `begin_watch`, and those of now."""
    step = model.optimizer.step
    if not isinstance(step, WatchedStep):
        return [digests_of_weights(model)]
    step.end()
    return [*step.digests, digests_of_weights(model)]


def differing(layout: Layout, digests: Sequence[tuple[int, int]]) -> list[int]:
    """Ranks whose weights are not those of most ranks that must have the same; all of these where there is no majority."""
    found: set[int] = set()
    for of_experts in (False, True):
        same: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(layout.world_size):
            at = layout.coords(rank)
            same[(at.etp, at.ep, at.pp) if of_experts else (at.tp, at.pp)].append(rank)
        for ranks in same.values():
            counts = Counter(digests[rank][of_experts] for rank in ranks).most_common()
            has_majority = len(counts) == 1 or counts[0][1] > counts[1][1]
            found |= {rank for rank in ranks if not has_majority or digests[rank][of_experts] != counts[0][0]}
    return sorted(found)
