"""An episode of several branches, as one row for the maths of a step and as one row per branch for the ranks.

An agent's history may go on from an earlier point of it, or begin anew. Each branch is a sample, and every token that the
policy sampled is in the mask of one of them. A reward belongs to the episode: so baselines, means and denominators are over
rows in which its branches lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.data.batch import Batch
from megarl.data.columns import of_responses
from megarl.data.sample import Sample


def episode_rows(samples: Sequence[Sample]) -> list[list[int]]:
    """The rows of each episode, its first branch first, episodes in order of their first rows."""
    rows: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        rows.setdefault(sample.episode_id, []).append(row)
    return list(rows.values())


def first_branches(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that are whole episodes, or the first branches of them."""
    return [sample for sample in samples if not sample.branch_of]


def spread_rewards(samples: Sequence[Sample], rewards: Sequence[float]) -> list[float]:
    """One reward per sample from one per episode, in the order of `first_branches`; what each source gave goes along."""
    judged = first_branches(samples)
    reward_of = {sample.sample_id: reward for sample, reward in zip(judged, rewards, strict=True)}
    first_of = {sample.sample_id: sample for sample in judged}
    for sample in samples:
        if sample.branch_of:
            sample.rewards = dict(first_of[sample.branch_of].rewards)
    return [reward_of[sample.episode_id] for sample in samples]


class JoinedEpisodes:
    """`batch` is `branches` with a row for each episode, columns and mask included; `split` gives them back."""

    def __init__(self, branches: Batch, *, apart: bool = False) -> None:
        """`apart`: each branch has a reward, and so a row, of its own."""
        self._branches = branches
        self.rows = [[row] for row in range(len(branches))] if apart else episode_rows(branches.samples)
        """Rows of the branches, by episode."""
        self.is_plain = len(self.rows) == len(branches)
        """Whether every episode is one row; the batch is then `branches` itself."""
        self.batch = branches if self.is_plain else self._joined()

    def _joined(self) -> Batch:
        samples = self._branches.samples
        joined = Batch([_one_behind_the_other([samples[row] for row in rows]) for rows in self.rows])
        joined.mask = self._laid(self._branches.mask)
        joined.columns = {name: self._laid(column) for name, column in self._branches.columns.items()}
        return joined

    def _laid(self, column: Tensor) -> Tensor:
        """`[B, T, …]` of branches as `[E, T', …]` of episodes."""
        lengths = self._branches.lengths.tolist()
        wide = max((sum(lengths[row] for row in rows) for rows in self.rows), default=0)
        laid = column.new_zeros((len(self.rows), wide, *column.shape[2:]))
        for episode, rows in enumerate(self.rows):
            whole = torch.cat([column[row, : lengths[row]] for row in rows])
            laid[episode, : len(whole)] = whole
        return laid

    def of_rows(self, rows: Sequence[int]) -> list[int]:
        """The episodes whose first branches are among `rows`."""
        chosen = {*rows}
        return [episode for episode, branches in enumerate(self.rows) if branches[0] in chosen]

    def split(self, names: Sequence[str] | None = None) -> None:
        """Give the branches the mask and the columns `names` of the episodes; None: all columns."""
        if not self.is_plain:
            self._branches.mask = self._cut(self.batch.mask)
            for name in self.batch.columns if names is None else names:
                self._branches.columns[name] = self._cut(self.batch.columns[name])

    def _cut(self, column: Tensor) -> Tensor:
        lengths = self._branches.lengths.tolist()
        cut = column.new_zeros((len(self._branches), self._branches.mask.shape[1], *column.shape[2:]))
        for episode, rows in enumerate(self.rows):
            start = 0
            for row in rows:
                cut[row, : lengths[row]] = column[episode, start : start + lengths[row]]
                start += lengths[row]
        return cut


def _one_behind_the_other(branches: Sequence[Sample]) -> Sample:
    first = branches[0]
    return replace(
        first,
        response_ids=[token for branch in branches for token in branch.response_ids],
        sampled_mask=[token for branch in branches for token in branch.sampled_mask],
        rollout_log_probs=[value for branch in branches for value in branch.rollout_log_probs],
        weight_versions=[version for branch in branches for version in branch.weight_versions],
        turn_rewards=[],
        turn_states=[],
        extra=of_responses(first.extra),
    )
