"""Online pairs in a run: a loss of pairs learns from the best and the worst response of every group."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms.preference import PreferenceSettings
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.experience.step_parts import ChosenRows, StepPart
from megarl.options.online_pairs.loss import PairLoss
from megarl.system.user_code import absolute_name


def choose_pairs(batch: Batch) -> ChosenRows:
    """The first response of the highest advantage in each group against the first of the lowest; adds `pair` and `is_chosen`.

    The columns are float `[B, T]`, the same at every token of a response: the number of its group, and 1 or 0. A response
    without sampled tokens is in no pair, nor is one to another prompt than its group's first. Of a tied group two are kept, so
    that every step has the same size; they teach nothing.
    """
    values = batch.columns["advantages"].masked_fill(~batch.mask, -torch.inf).amax(1).tolist()
    usable = batch.mask.any(1).tolist()
    of_group: dict[int, list[int]] = {}
    for row, group in enumerate(batch.groups.tolist()):
        first = of_group.get(group, [row])[0]
        if usable[row] and _prompt(batch, row) == _prompt(batch, first):
            of_group.setdefault(group, []).append(row)
    rows, untied, chosen = list[int](), set[int](), torch.zeros(len(batch))
    for members in (members for members in of_group.values() if len(members) > 1):
        best, worst = max(members, key=values.__getitem__), min(members, key=values.__getitem__)
        if values[best] == values[worst]:
            best, worst = members[:2]
        else:
            untied |= {best, worst}
        chosen[best] = 1
        rows += [best, worst]
    batch.columns["pair"] = batch.groups[:, None].float().expand(batch.mask.shape)
    batch.columns["is_chosen"] = chosen[:, None].expand(batch.mask.shape)
    figures = {"pairs/used": len(untied) / 2, "pairs/tied": (len(rows) - len(untied)) / 2}
    return ChosenRows(tuple(rows), frozenset(untied), figures, ("pair", "is_chosen"))


def _prompt(batch: Batch, row: int) -> tuple[Any, ...]:
    sample = batch.samples[row]
    return (sample.prompt_media, *sample.prompt_ids)


class OnlinePairs(StepPart):
    """The part of a loss that compares two responses."""

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        self._loss = PairLoss(absolute_name(algorithm.policy_loss), PreferenceSettings(**algorithm.policy_loss_args))

    def choose_rows(self, batch: Batch) -> ChosenRows:
        """Two responses of every group that has two."""
        return choose_pairs(batch)

    def stream_loss(self) -> PairLoss:
        """The preference loss of the config."""
        return self._loss


def take_part(config: Config, tokenizer: Any) -> OnlinePairs | None:
    """The pairs of a run whose loss is one of pairs."""
    return OnlinePairs(config) if config.algorithm.loss_needs.pairs else None
