"""An estimate of a whole batch in one process: what the driver and the ranks do of it, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.experience.estimation import estimate_tokens, mean_entropy
from megarl.experience.experience import Experience, RowFacts


def estimate(
    experience: Experience, batch: Batch, rewards: Sequence[float], greedy: Sequence[tuple[Sample, float]] | None = None
) -> dict[str, float]:
    """Add advantages to `batch`; returns metrics. `greedy`: greedy responses, one to every prompt, with their rewards."""
    of_greedy = None
    if greedy is not None:
        of_greedy = RowFacts.of(Batch([sample for sample, _ in greedy])), [reward for _, reward in greedy]
    rows = experience.row_inputs(RowFacts.of(batch), rewards, of_greedy)
    return experience.take_outcome(rows, estimate_tokens(experience.config, batch, rows))


def steer_entropy(experience: Experience, batch: Batch) -> dict[str, float]:
    """Set `entropy_coef` by the mean entropy of the tokens that `batch`, with `old_entropy`, trains on; a metric."""
    return experience.steer_entropy_by(mean_entropy(experience.config, batch))
