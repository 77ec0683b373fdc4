"""The work of a step on its tokens, wherever these are: the driver's part, and what it has the training side do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.data.stored_batch import batch_of
from megarl.data.stored_shares import RowTask
from megarl.experience.estimation import columns_read, estimate_part
from megarl.experience.experience import Experience, RowFacts
from megarl.experience.step_tokens import READ_BY_CHOICES, makes_token_columns
from megarl.runs.training_side import TrainingSide


def estimate(
    roles: TrainingSide,
    experience: Experience,
    batch: Batch,
    rewards: Sequence[float],
    greedy: Sequence[tuple[Sample, float]] | None = None,
) -> tuple[dict[str, float], float | None]:
    """Add advantages to a batch that has what the estimator reads; returns metrics, and the mean entropy where it steers the
    entropy bonus.

    Args:
        roles: has the tokens' part done.
        experience: does the part of rows, and remembers what must outlive the step.
        batch: gets the columns.
        rewards: one per row, unshaped.
        greedy: greedy responses, one to every prompt, with their rewards, for an estimator that needs them.
    """
    of_greedy = None
    if greedy is not None:
        of_greedy = RowFacts.of(batch_of([sample for sample, _ in greedy])), [reward for _, reward in greedy]
    rows = experience.row_inputs(RowFacts.of(batch), rewards, of_greedy)
    config = experience.config
    read, apart = columns_read(config, rows), not rows.needed.whole_batch
    task = RowTask(estimate_part, [config], lambda part: [rows.of_rows(part)], read, apart=apart)
    outcome = roles.compute(batch, task)[0]
    return experience.take_outcome(rows, outcome), outcome.entropy


def make_token_columns(
    roles: TrainingSide, config: Config, batch: Batch, rows: Sequence[int], rewards: Sequence[float], update_number: int
) -> None:
    """Set the columns of the tokens that an optimizer step over `rows` treats apart (`token_choices.set_token_columns`)."""
    if not makes_token_columns(config):
        return
    from megarl.experience.token_choices import token_columns_part  # few configs ask for one

    chosen = {*rows}

    def inputs(part: Sequence[int]) -> Sequence[Any]:
        its_rewards = [rewards[row] for row in part] if rewards else []
        return [place for place, row in enumerate(part) if row in chosen], its_rewards

    roles.compute(batch, RowTask(token_columns_part, [config, update_number], inputs, READ_BY_CHOICES))
